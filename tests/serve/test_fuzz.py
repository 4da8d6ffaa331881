"""Requests made up from the server's own schema, right and wrong: never a 500, and every error in one shape."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import GenerationMode

from tests.serve.conftest import Serving, assembled_for, room_for, running
from tests.serve.scripted import scripted
from tests.tables import seeds

QUIET = settings(
    max_examples=len(seeds(12, 50)),
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def small(demo: tuple[Any, Any]) -> Iterator[Serving]:
    """The model says what it is told to, so that what is right is answered soon."""
    assembled = assembled_for(*demo, room_for(context=64, max_running=16))
    with running(scripted(assembled, "Hello there", demo[1])) as found:
        yield found


def check(response: httpx.Response) -> None:
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str) and error["message"]


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_made_up_bodies(small: Serving, path: str, mode: GenerationMode) -> None:
    operation = schemathesis.openapi.from_dict(httpx.get(f"{small.url}/openapi.json").json())[path]["POST"]
    statuses: dict[int, int] = {}

    with small.http() as client:

        @seed(7)
        @QUIET
        @given(case=operation.as_strategy(generation_mode=mode))
        def run(case: Any) -> None:
            body = case.body
            if isinstance(body, dict) and isinstance(body.get("model"), str):
                body = body | {"model": "demo"}  # else nothing behind the name is reached
            try:
                content = json.dumps(body).encode()
            except TypeError:
                return  # no JSON at all
            got = client.post(path, content=content, headers={"content-type": "application/json"})
            check(got)
            statuses[got.status_code] = statuses.get(got.status_code, 0) + 1

        run()
    assert statuses.get(400, 0) > 0
    assert not small.scheduler.running and not small.scheduler.waiting
    assert small.client.completions.create(model="demo", prompt="a", max_tokens=2).choices[0].text is not None


MUTATIONS = [None, True, -1, 1.5, 10**30, "", "x", "\u0000", [], [None], {}, {"a": {}}, [[]], [{"role": "user"}]]


@pytest.mark.slow
def test_every_field_with_every_kind_of_value(small: Serving) -> None:
    """One wrong at a time, beside what is right."""
    schemas = httpx.get(f"{small.url}/openapi.json").json()["components"]["schemas"]
    chat = {"model": "demo", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    plain = {"model": "demo", "prompt": "a", "max_tokens": 1}
    items = {"model": "demo", "input": "a", "max_output_tokens": 1}
    with small.http() as client:
        for path, name, right in (
            ("/v1/chat/completions", "ChatRequest", chat),
            ("/v1/completions", "CompletionRequest", plain),
            ("/v1/responses", "ResponsesRequest", items),
        ):
            assert client.post(path, json=right).status_code == 200
            for field in schemas[name]["properties"]:
                for value in MUTATIONS:
                    check(client.post(path, json=right | {field: value}))
