"""What is read off an engine: here of one whose device has host memory behind it, and of one with workers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import expertly
from expertly.serve.view import View
from tests.engine.peers import put_in_threads
from tests.engine.streams import put_in_place
from tests.serve.conftest import assembled_for


@contextmanager
def viewed(**options: Any) -> Iterator[tuple[Any, View, int]]:
    """A model, its view, and the bytes of an expert."""
    model, tokenizer = expertly.load(**{"memory": "25%", "device": "cpu", "system": "lru"} | options)
    try:
        view = assembled_for(model, tokenizer).view
        yield model, view, view.stats()["expert_bytes"] // (12 * 32)
    finally:
        expertly.unload(model)


def test_host_memory_is_that_of_the_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    put_in_place(monkeypatch, 50)
    with viewed(dtype="float32") as (_, view, expert_nbytes):
        memory = view.memory(view.stats())
        assert memory["host_experts_bytes"] == 36 << 20
        assert 0 < memory["host_resident_bytes"] <= 36 << 20
        assert memory["host_resident_bytes"] % expert_nbytes == 0


def test_workers_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """What each holds, its hit rate, the time on the way, and that it is gone."""
    peers = put_in_threads(monkeypatch)
    with viewed(workers=2, memory="15%") as (model, view, expert_nbytes):
        inputs = model._expertly_tokenizer("The old man", return_tensors="pt", return_token_type_ids=False)
        model.generate(**inputs, max_new_tokens=4, do_sample=False)
        first, second = view.state()["workers"]
        assert (first["device"], second["device"]) == ("w0", "w1") and first["alive"] and second["alive"]
        home = view.stats()["devices"][0]
        assert first["experts"] + second["experts"] + home["experts"] == 12 * 32
        assert 0 < first["hit_rate"] < 1 and 0 <= first["link_s"] <= first["call_s"]
        memory = view.memory(view.stats())
        assert memory["experts_resident_bytes"] == home["resident_bytes"] <= memory["experts_bytes"]
        assert memory["workers_resident_bytes"] == first["resident_bytes"] + second["resident_bytes"]
        shown = sum(sum(layer["segments_present"]) for layer in view.experts()["layers"])
        assert shown * expert_nbytes == memory["workers_resident_bytes"] + memory["experts_resident_bytes"]
        peers[1].kill()
        model.generate(**inputs, max_new_tokens=4, do_sample=False)
        text = view.metrics().decode()
        assert 'expertly_worker_alive{worker="w0"} 1.0' in text and 'expertly_worker_alive{worker="w1"} 0.0' in text
