"""What is read off an engine: here of one whose device has host memory behind it."""

from __future__ import annotations

from typing import Any

import pytest

import expertly
from expertly import api
from expertly.engine.backend_tiered import TieredBackend
from expertly.serve.readings import Readings, compressed_here
from tests.engine.test_tiered import LateStreams
from tests.serve.conftest import served


def test_host_memory_is_that_of_the_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    def make_backend(device: Any, store: Any, geometry: Any, slots: Any, dtype: Any, *rest: Any) -> TieredBackend:
        return TieredBackend(device, LateStreams(), store, geometry, slots, dtype, geometry.nbytes // 2)

    monkeypatch.setattr(api, "make_backend", make_backend)
    model, tokenizer = expertly.load(memory="25%", dtype="float32", device="cpu", system="lru")
    try:
        readings = Readings(api.handle(model))
        before = readings.host_memory()
        assert before == {"host_experts_bytes": 36 << 20, "host_resident_bytes": 0}
        inputs = tokenizer("The old man", return_tensors="pt", return_token_type_ids=False)
        model.generate(**inputs, max_new_tokens=4, do_sample=False)
        after = readings.host_memory()
        expert_nbytes = api.stats(model).as_dict()["expert_bytes"] // (12 * 32)
        assert 0 < after["host_resident_bytes"] <= 36 << 20
        assert after["host_resident_bytes"] % expert_nbytes == 0
    finally:
        expertly.unload(model)


def test_a_device_that_reads_from_disk_has_none() -> None:
    model, _ = expertly.load(memory="25%", device="cpu", system="lru")
    try:
        assert Readings(api.handle(model)).host_memory() == {}
    finally:
        expertly.unload(model)


def test_what_stays_compressed_is_told_as_a_part_of_the_memory() -> None:
    model, tokenizer = expertly.load(
        memory="50%", dtype="float32", device="cpu", system="lru", codec="planes", compressed="40%"
    )
    try:
        with served(model, tokenizer) as serving, serving.http() as http:
            asked = {"model": "demo", "prompt": "The old man looked at the sea", "max_tokens": 6, "temperature": 0}
            for _ in range(2):
                assert http.post("/v1/completions", json=asked).status_code == 200
            stats = api.stats(model).as_dict()
            total, here = stats["memory_bytes"], compressed_here(stats)
            assert 0.35 * total < here <= 0.4 * total + 1 and here == stats["compressed_bytes"]
            assert here + stats["kept_bytes"] + stats["ring_bytes"] == total <= 0.5 * stats["expert_bytes"]
            assert stats["bytes_compressed_hit"] > 0, "what is there was of use"
            assert memory_metric(http.get("/metrics").text, "experts_compressed") == here
            told = serving.assembled.view.state()["memory"]
            assert told["experts_compressed_bytes"] == here and told["experts_resident_bytes"] <= total - here
    finally:
        expertly.unload(model)


def memory_metric(metrics: str, use: str) -> float:
    """Of that use, as /metrics says it."""
    begin = f'expertly_memory_bytes{{use="{use}"}} '
    (value,) = [line.removeprefix(begin) for line in metrics.splitlines() if line.startswith(begin)]
    return float(value)
