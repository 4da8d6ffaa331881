"""What is read off an engine: here of one whose device has host memory behind it."""

from __future__ import annotations

from typing import Any

import pytest

import expertly
from expertly import api
from expertly.engine.tiered import CudaDevice
from expertly.serve.readings import Readings
from tests.engine.test_tiered import LateStreams


def test_host_memory_is_that_of_the_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    def make_backend(device: Any, store: Any, geometry: Any, slots: Any, dtype: Any, *rest: Any) -> CudaDevice:
        return CudaDevice(device, LateStreams(), store, geometry, slots, dtype, geometry.nbytes // 2)

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
