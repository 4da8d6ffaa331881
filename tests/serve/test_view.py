"""What is read off an engine: here of one whose device has host memory behind it."""

from __future__ import annotations

import time
from typing import Any

import pytest

import expertly
from expertly import api
from expertly.serve.metrics import RequestMetrics
from expertly.serve.view import View
from tests.engine.streams import put_in_place


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
