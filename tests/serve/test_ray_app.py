"""Two replicas of a local Ray cluster answer as one server."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import ray

import expertly
from expertly.core.errors import ConfigError
from tests.serve.conftest import KEY, greedy

pytestmark = pytest.mark.slow

PROMPT = "The old man looked at the sea and said"


@pytest.fixture(scope="module")
def monkeypatch() -> Iterator[pytest.MonkeyPatch]:
    """One that lasts as long as the cluster: its workers inherit what it sets."""
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of two replicas of the demo model."""
    from ray import serve

    from expertly.serve.ray_app import app

    folder = tmp_path_factory.mktemp("ray")
    keys = folder / "keys"
    keys.write_text(KEY)
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    source = str(Path(expertly.__file__).parent.parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([source, os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(
        address="local",  # not one that happens to run here
        num_cpus=4,
        include_dashboard=False,
        object_store_memory=100 << 20,
        log_to_driver=False,
        configure_logging=False,
    )
    options = {
        "replicas": 2,
        "memory": "40%",
        "dtype": "float32",
        "device": "cpu",
        "system": "fmoe",
        "context": 256,
        "learned": str(folder / "demo.maps"),
        "api_key_file": str(keys),
        "drain_seconds": 5,
    }
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(app(options), name="expertly", route_prefix="/")
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


def ask(url: str, path: str) -> httpx.Response:
    return httpx.get(url + path, headers={"Authorization": f"Bearer {KEY}"}, timeout=30)


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=60)


def test_two_replicas_answer_as_one_server(cluster: str) -> None:
    from ray import serve

    client = client_of(cluster)
    refused = httpx.get(f"{cluster}/v1/models", timeout=30)
    assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
    assert serve.status().applications["expertly"].deployments["expertly"].replica_states == {"RUNNING": 2}
    told = {"model": "demo", "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    texts = set()
    for _ in range(6):
        texts.add(client.completions.create(**told).choices[0].text)
    chunks = list(client.completions.create(**told, stream=True))
    texts.add("".join(chunk.choices[0].text for chunk in chunks))
    assert len(chunks) > 10
    model, tokenizer = expertly.load(memory="40%", dtype="float32", device="cpu", system="lru")
    try:
        assert texts == {greedy(model, tokenizer, PROMPT, 24)}
    finally:
        expertly.unload(model)


def test_a_client_that_goes_frees_its_place_through_the_proxy(cluster: str) -> None:
    stream = client_of(cluster).completions.create(
        model="demo", prompt=PROMPT, max_tokens=200, temperature=0, logit_bias={"0": -100}, stream=True
    )
    next(iter(stream))
    stream.close()
    end = time.monotonic() + 60
    while not any(sample(cluster, 'expertly_requests_total{outcome="cancelled"') for _ in range(4)):
        assert time.monotonic() < end
        time.sleep(0.2)
    for _ in range(8):
        assert sample(cluster, "expertly_texts_running") == 0


def sample(url: str, metric: str) -> float:
    """The sample whose line begins so, of one of the replicas; 0 where it has none."""
    rows = [line for line in ask(url, "/metrics").text.splitlines() if line.startswith(metric)]
    return float(rows[0].rsplit(" ", 1)[1]) if rows else 0.0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({}, "accepted: api_key_file, on every machine, or no_key=true"),
        ({"no_key": True, "api_key_file": "keys"}, "accepted: api_key_file, on every machine, or no_key=true"),
        ({"no_key": "yes"}, "no_key='yes': accepted: true or false"),
        ({"no_key": "true", "replicas": "many"}, "replicas='many': "),
        ({"no_key": "true", "memori": "25%"}, r"memori='25%': .*accepted: memory, .*replicas, "),
    ],
)
def test_what_cannot_work_is_named(options: dict[str, Any], sentence: str) -> None:
    from expertly.serve.ray_app import app

    with pytest.raises(ConfigError, match=sentence):
        app(options)
