"""What is read off an engine: here of one whose device has host memory behind it, and of one with workers."""

from __future__ import annotations

import time
from typing import Any

import pytest

import expertly
from expertly import api
from expertly.serve.metrics import RequestMetrics
from expertly.serve.view import View
from tests.engine.peers import put_in_threads
from tests.engine.streams import put_in_place
from tests.serve.conftest import assembled_for


def view_of(model: Any) -> View:
    nobody: Any = None
    return View(nobody, api.handle(model), nobody, RequestMetrics(), time.monotonic)


def test_host_memory_is_that_of_the_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    put_in_place(monkeypatch, 50)
    model, tokenizer = expertly.load(memory="25%", dtype="float32", device="cpu", system="lru")
    try:
        view = view_of(model)
        before = view.host_memory()
        assert before == {"host_experts_bytes": 36 << 20, "host_resident_bytes": 0}
        inputs = tokenizer("The old man", return_tensors="pt", return_token_type_ids=False)
        model.generate(**inputs, max_new_tokens=4, do_sample=False)
        after = view.host_memory()
        expert_nbytes = api.stats(model).as_dict()["expert_bytes"] // (12 * 32)
        assert 0 < after["host_resident_bytes"] <= 36 << 20
        assert after["host_resident_bytes"] % expert_nbytes == 0
    finally:
        expertly.unload(model)


def test_workers_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """What each holds, its hit rate, the time on the way, and that it is gone."""
    peers = put_in_threads(monkeypatch)
    model, tokenizer = expertly.load(memory="25%", workers=2, worker_memory="15%", device="cpu", system="lru")
    try:
        view = assembled_for(model, tokenizer).view
        inputs = tokenizer("The old man", return_tensors="pt", return_token_type_ids=False)
        model.generate(**inputs, max_new_tokens=4, do_sample=False)
        first, second = view.state()["workers"]
        assert (first["device"], second["device"]) == ("w0", "w1") and first["alive"] and second["alive"]
        devices = expertly.stats(model).as_dict()["devices"]
        assert first["experts"] + second["experts"] + devices[0]["experts"] == 12 * 32
        assert 0 < first["hit_rate"] < 1 and 0 <= first["link_s"] <= first["call_s"]
        memory = view.memory(view.stats())
        assert memory["experts_resident_bytes"] == devices[0]["resident_bytes"] <= memory["experts_bytes"]
        assert memory["workers_resident_bytes"] == first["resident_bytes"] + second["resident_bytes"]
        shown = sum(sum(layer["segments_present"]) for layer in view.experts()["layers"])
        expert_nbytes = api.stats(model).as_dict()["expert_bytes"] // (12 * 32)
        assert shown * expert_nbytes == memory["workers_resident_bytes"] + memory["experts_resident_bytes"]
        peers[1].can_start = False
        peers[1].kill()
        model.generate(**inputs, max_new_tokens=4, do_sample=False)
        text = view.metrics().decode()
        assert 'expertly_worker_alive{worker="w0"} 1.0' in text and 'expertly_worker_alive{worker="w1"} 0.0' in text
        assert 'expertly_worker_drops_total{worker="w1"} 1.0' in text
        assert 'expertly_worker_link_seconds_total{worker="w0"}' in text
        assert 'expertly_worker_hit_ratio{phase="decode",worker="w0"}' in text
    finally:
        expertly.unload(model)
