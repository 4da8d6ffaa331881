"""Who may ask, what may be asked, and what of it is written down."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from expertly.serve.answers import CompletionAnswer
from expertly.serve.settings import is_key
from tests.serve.conftest import KEY, Serving, served


@pytest.fixture(scope="module")
def guarded(demo: tuple[Any, Any]) -> Iterator[Serving]:
    with served(*demo, keys=(KEY, "another-key-of-this-server"), max_body=10_000) as found:
        yield found


def test_keys(guarded: Serving) -> None:
    assert guarded.client.models.list().data[0].id == "demo"
    for key in ("wrong", KEY[:-1], KEY + "x", "-", "ключ"):
        for path in ("/v1/models", "/v1/experts", "/v1/state", "/metrics", "/nothing"):
            got = httpx.get(guarded.url + path, headers={"Authorization": f"Bearer {key}".encode()})
            assert (got.status_code, got.json()["error"]["code"]) == (401, "invalid_api_key")
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="no", max_retries=0).models.list()
    for path in ("/", "/health", "/ready"):
        assert httpx.get(guarded.url + path).status_code == 200
    assert not is_key("", (KEY,))


def test_a_page_of_another_site_cannot_use_a_server_without_a_key(serving: Serving) -> None:
    rebound = httpx.get(f"{serving.url}/v1/models", headers={"Host": "attacker.example"})
    assert (rebound.status_code, rebound.json()["error"]["code"]) == (403, "wrong_host")
    simple = httpx.post(f"{serving.url}/v1/completions", content=b"{}", headers={"content-type": "text/plain"})
    assert simple.status_code == 415
    preflight = httpx.options(f"{serving.url}/v1/completions", headers={"Origin": "https://attacker.example"})
    assert "access-control-allow-origin" not in preflight.headers


BODIES = {  # and what is answered
    "not JSON": (b"{", 400),
    "not UTF-8": (b'{"model": "\xff\xfe"}', 400),
    "a list": (b"[]", 400),
    "NaN": (b'{"model": "demo", "prompt": "a", "temperature": NaN}', 400),
    "a huge number": (b'{"model": "demo", "prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}", 400),
    "deep": (b'{"model": "demo", "prompt": ' + b"[" * 3000 + b"]" * 3000 + b"}", 400),
    "a token that is none": (b'{"model": "demo", "prompt": [99999999]}', 400),
    "too large": (b'{"model": "demo", "prompt": "' + b"a" * 20_000 + b'"}', 413),
    "a path as the model": (b'{"model": "../../etc/passwd", "prompt": "a"}', 404),
    "remote code": (b'{"model": "demo", "prompt": "a", "max_tokens": 1, "trust_remote_code": true}', 200),
}


@pytest.mark.parametrize("name", BODIES)
def test_hostile_bodies(guarded: Serving, name: str) -> None:
    body, status = BODIES[name]
    headers = {"content-type": "application/json", "Authorization": f"Bearer {KEY}"}
    got = httpx.post(f"{guarded.url}/v1/completions", content=body, headers=headers)
    assert got.status_code == status
    if status != 200:  # else it changed nothing
        error = got.json()["error"]
        assert set(error) == {"message", "type", "param", "code"} and len(error["message"]) <= 500


def test_a_bug_in_a_stream_is_told_in_it(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CompletionAnswer, "last_chunks", lambda self: 1 // 0)
    body = {"model": "demo", "prompt": "a", "max_tokens": 2, "stream": True}
    with serving.http() as client:
        lines = [line for line in client.post("/v1/completions", json=body).text.splitlines() if line]
    error = json.loads(lines[-1].removeprefix("data: "))["error"]
    assert error["type"] == "server_error" and "division" not in error["message"]


def test_unknown_paths_and_methods_have_the_same_shape(guarded: Serving) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    for method, path in (("GET", "/v1/nothing"), ("DELETE", "/v1/models"), ("POST", "/reset")):
        got = httpx.request(method, guarded.url + path, headers=headers)
        assert got.status_code in (404, 405)
        assert set(got.json()["error"]) == {"message", "type", "param", "code"}


def test_no_prompt_is_logged(serving: Serving, caplog: pytest.LogCaptureFixture) -> None:
    secret = "xylophone quartz"
    with caplog.at_level(logging.DEBUG):
        serving.complete(secret, 2)
        with pytest.raises(openai.BadRequestError):
            serving.complete(secret, 2, temperature=5)
    said = "\n".join(record.getMessage() for record in caplog.records if not record.name.startswith(("openai", "http")))
    assert secret not in said and "prompt tokens" in said


def test_every_token_is_counted(serving: Serving) -> None:
    """Of several texts, too; times are between tokens of one text."""
    before = serving.metrics()
    serving.complete("The old man", 5, n=3, logit_bias={"0": -100})
    after = serving.metrics()
    for name, num in {
        "expertly_generated_tokens_total": 15,
        "expertly_time_per_output_token_seconds_count": 12,
        "expertly_time_to_first_token_seconds_count": 1,
        'expertly_requests_total{outcome="length"}': 1,
    }.items():
        assert after[name] - before.get(name, 0) == num, name


def test_what_can_be_seen(serving: Serving) -> None:
    serving.complete("The old man")
    with serving.http() as client:
        experts = client.get("/v1/experts").json()
        present = [sum(layer["segments_present"]) for layer in experts["layers"]]
        assert len(present) == 12 and all(0 < num <= 32 * experts["segments"] for num in present)
        per_segment = experts["expert_bytes"] / (12 * 32 * experts["segments"])
        state = client.get("/v1/state").json()
        assert sum(present) * per_segment == state["memory"]["experts_resident_bytes"]
        assert "host_experts_bytes" not in state["memory"], "there is no such tier"
        assert state["tokens_written"] >= 8 and state["hits"] > 0 < state["misses"]
        assert state["hits"] == sum(layer["hits"] for layer in experts["layers"])
        assert client.get("/metrics").headers["content-type"].startswith("text/plain")
        told = serving.metrics()
        assert told['expertly_hits_total{phase="decode"}'] > 0 < told['expertly_misses_total{phase="decode"}']
        assert told["expertly_time_to_first_token_seconds_count"] >= 1
        assert told["expertly_generated_tokens_total"] >= 8
        policy = client.get("/").headers["content-security-policy"]
        assert "default-src 'none'" in policy
