"""Two replicas of a local Ray cluster: both answer, each says who it is, and one learns what the other has seen."""

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

pytestmark = [pytest.mark.slow, pytest.mark.alone]

PROMPT = "The old man looked at the sea and said"


@pytest.fixture(scope="module")
def monkeypatch() -> Iterator[pytest.MonkeyPatch]:
    """One that lasts as long as the cluster: its workers inherit what it sets."""
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of two replicas of the demo model with fMoE, that begin with no maps."""
    from ray import serve

    from expertly.serve.ray_app import RayOptions, app

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
    options = RayOptions(
        replicas=2,
        memory="40%",
        dtype="float32",
        device="cpu",
        system="fmoe",
        context=256,
        learned=str(folder / "demo.maps"),
        api_key_file=str(keys),
        share_every_s=1.0,
        drain_seconds=5.0,
    )
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(app(options), name="expertly", route_prefix="/")
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


def ask(url: str, path: str) -> httpx.Response:
    return httpx.get(url + path, headers={"Authorization": f"Bearer {KEY}"}, timeout=30)


def states(url: str) -> dict[str, dict[str, Any]]:
    """Of both replicas, each asked as often as it takes."""
    found: dict[str, dict[str, Any]] = {}
    end = time.monotonic() + 30
    while len(found) < 2 and time.monotonic() < end:
        got = ask(url, "/v1/state")
        found[got.headers["x-expertly-replica"]] = got.json()
    return found


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=60)


def test_two_replicas_answer_as_one_server(cluster: str) -> None:
    client = client_of(cluster)
    assert len(states(cluster)) == 2
    told = {"model": "demo", "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    texts, by = set(), set()
    for _ in range(6):
        raw = client.completions.with_raw_response.create(**told)
        texts.add(raw.parse().choices[0].text)
        by.add(raw.headers["x-expertly-replica"])
    chunks = list(client.completions.create(**told, stream=True))
    texts.add("".join(chunk.choices[0].text for chunk in chunks))
    assert len(chunks) > 10
    model, tokenizer = expertly.load(memory="40%", dtype="float32", device="cpu", system="lru")
    try:
        assert texts == {greedy(model, tokenizer, PROMPT, 24)}
    finally:
        expertly.unload(model)
    assert len(by) == 2


def test_what_one_replica_has_seen_the_other_learns(cluster: str) -> None:
    """Prompts that only one of them sees: the same one teaches nothing new."""
    end, number = time.monotonic() + 30, 0
    while not (len(found := of_replicas(cluster, "expertly_learned_from_others_total")) == 2 and all(found.values())):
        assert time.monotonic() < end, f"learned from others, by replica: {found}"
        number += 1
        client_of(cluster).completions.create(model="demo", prompt=f"{number} {PROMPT}", max_tokens=8, temperature=0)
        time.sleep(0.3)


def test_a_client_that_goes_frees_its_place_through_the_proxy(cluster: str) -> None:
    stream = client_of(cluster).completions.create(
        model="demo", prompt=PROMPT, max_tokens=200, temperature=0, logit_bias={"0": -100}, stream=True
    )
    next(iter(stream))
    stream.close()
    end = time.monotonic() + 20  # what one replica knows of the other is some seconds old
    while (
        sum(of_replicas(cluster, 'expertly_requests_total{outcome="cancelled"').values()) < 1
        or sum(of_replicas(cluster, "expertly_texts_running").values()) > 0
    ):
        assert time.monotonic() < end
        time.sleep(0.2)


def of_replicas(url: str, metric: str) -> dict[str, float]:
    """The samples whose lines begin so, by replica."""
    rows = [line for line in ask(url, "/metrics").text.splitlines() if line.startswith(metric)]
    return {line.split('replica="')[1].split('"')[0]: float(line.rsplit(" ", 1)[1]) for line in rows}


def test_metrics_are_of_all_replicas(cluster: str) -> None:
    text = ask(cluster, "/metrics").text
    assert text.count("# TYPE expertly_requests_waiting gauge") == 1
    assert sum(line.startswith("expertly_requests_waiting{replica=") for line in text.splitlines()) == 2


def test_a_key_is_asked_for(cluster: str) -> None:
    got = httpx.get(f"{cluster}/v1/models", timeout=30)
    assert (got.status_code, got.json()["error"]["code"]) == (401, "invalid_api_key")
    assert httpx.get(f"{cluster}/ready", timeout=30).json() == {"status": "ready"}


def test_what_cannot_work_is_named() -> None:
    from expertly.serve.ray_app import RayOptions, app

    with pytest.raises(ConfigError, match="api_key_file: missing"):
        app(RayOptions())
    with pytest.raises(ConfigError, match="one of the two"):
        app(RayOptions(no_key=True, api_key_file="keys"))
    with pytest.raises(ConfigError, match="replicas='many': "):
        app({"no_key": "true", "replicas": "many"})
    with pytest.raises(ConfigError, match=r"memori='25%': .*accepted: memory, .*replicas, "):
        app({"no_key": "true", "memori": "25%"})
    with pytest.raises(ConfigError, match="nothing-like-it"):
        app(RayOptions(no_key=True, system="nothing-like-it"))
    with pytest.raises(ConfigError, match="codec='zip': unknown; accepted: none, planes, auto"):
        app(RayOptions(no_key=True, codec="zip"))
    with pytest.raises(ConfigError, match=r"compressed='30%': .*accepted: codec='planes'"):
        app({"no_key": "true", "compressed": "30%"})
