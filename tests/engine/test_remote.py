"""Workers that hold and compute experts for an engine: the tokens of the unmodified model, whichever worker dies."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import expertly
from expertly.api import handle
from expertly.core.errors import ConfigError, TransferError
from expertly.engine import remote, wire, worker
from expertly.engine.cluster import start_workers
from expertly.engine.shard import Shard
from expertly.engine.wire import Kind
from expertly.model.packing import pack
from tests.engine.conftest import Case, Cases
from tests.engine.observe import counts, loaded, reader_threads
from tests.engine.peers import ThreadPeer, put_in_threads
from tests.engine.streams import put_in_place
from tests.engine.test_batching import run_batch
from tests.families import FAMILIES, generate, load_reference, logits_of, make_checkpoint, make_prompts
from tests.model.checkpoints import make_int4_checkpoint, make_mxfp4_checkpoint
from tests.tables import crossed

pytestmark = pytest.mark.timeout(120)


@contextmanager
def with_workers(store: Any, workers: int = 2, **settings: Any) -> Iterator[Any]:
    """A model whose devices and workers each have less than their experts."""
    with loaded(store, **({"workers": workers, "memory": "25%"} | settings)) as model:
        yield model


def of_workers(model: Any) -> list[dict[str, Any]]:
    """The statistics of each worker."""
    return [each for each in expertly.stats(model).as_dict()["devices"] if each["worker"] is not None]


def states(model: Any, name: str) -> list[Any]:
    return [each["worker"][name] for each in of_workers(model)]


# -- the same tokens -------------------------------------------------------------------------------------------------


SEGMENTS = {
    "qwen3_moe": 1, "gpt_oss": 1, "deepseek_v3": 4, "granitemoe": 1, "qwen2_moe": 2,
}  # fmt: skip
WORKERS = {1: ("50%",), 2: ("25%", "50%"), 4: ("100%", "20%", "30%", "20%")}
"""Memory of each. Beside 25 % here, it is less than all experts, exactly all, and more."""


@pytest.mark.parametrize(
    ("family", "place"), crossed([*SEGMENTS, *reversed(SEGMENTS)], [*product(WORKERS, ("25%", "100%"))])
)
def test_tokens_and_logits_are_the_reference_also_when_a_worker_dies(
    family: str, place: tuple[int, str], cases: Cases, monkeypatch: pytest.MonkeyPatch
) -> None:
    num, memory = place
    case, num_layers, top_k = cases[family], FAMILIES[family].num_moe_layers, FAMILIES[family].top_k
    settings: dict[str, Any] = {"memory": memory, "segments": SEGMENTS[family], "verify": "never"}
    settings["system"] = {1: "expertly", 2: "static", 4: "lru"}[num]
    peers = put_in_threads(monkeypatch, *WORKERS[num])
    with with_workers(case.store, num, **settings) as model:
        assert generate(model, case.prompts) == case.tokens
        torch.testing.assert_close(logits_of(model, case.prompts), case.logits, rtol=1e-4, atol=1e-5)
        stats = expertly.stats(model).as_dict()
        assert stats["bytes_loaded"] == stats["bytes_disk"] == sum(each["bytes_loaded"] for each in stats["devices"])
        assert sum(each["experts"] for each in stats["devices"]) == num_layers * 8
        for each in of_workers(model):
            assert each["bytes_loaded"] > 0
            assert each["decode"]["hits"] + each["decode"]["misses"] > 0 or top_k == 1, "of two prompts, two at a time"
            assert each["worker"]["bytes_sent"] > 0 and each["worker"]["bytes_received"] > 0
            assert each["worker"]["alive"] and each["worker"]["call_s"] >= each["worker"]["link_s"] >= 0
        peers[0].before = at_layer(2, peers[0].kill)
        assert generate(model, case.prompts) == case.tokens
        torch.testing.assert_close(logits_of(model, case.prompts), case.logits, rtol=1e-4, atol=1e-5)
        assert states(model, "alive") == [False, *[True] * (num - 1)]
    assert not reader_threads()


@pytest.mark.parametrize("make", [make_mxfp4_checkpoint, make_int4_checkpoint])
def test_quantised_experts_give_what_they_give_here(
    make: Callable[..., Path], peers: list[ThreadPeer], tmp_path: Path
) -> None:
    store = pack(make(tmp_path / "model", dtype=torch.float32), tmp_path / "store")
    prompts = make_prompts(2, length=14)
    with loaded(store.folder, segments=2) as model:
        tokens, logits = generate(model, prompts), logits_of(model, prompts)
    with with_workers(store.folder, segments=2) as model:
        for is_alive in (True, False):
            assert generate(model, prompts) == tokens
            torch.testing.assert_close(logits_of(model, prompts), logits, rtol=1e-4, atol=1e-5 * logits.abs().max())
            assert states(model, "alive") == [is_alive, True]
            assert all(device["decode"]["misses"] for device in of_workers(model))
            peers[0].before = at_layer(5, peers[0].kill)


def test_beside_an_accelerator(cases: Cases, peers: list[ThreadPeer], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its code, with copies that happen as late as they may."""
    case, made = cases["mixtral"], put_in_place(monkeypatch)
    with with_workers(case.store, system="lru", segments=4, memory="15%") as model:
        for _ in range(2):
            assert generate(model, case.prompts) == case.tokens
        assert len(made) == 1 and made[0].stats()["copied_nbytes"] > 0
        assert all(states(model, "bytes_received")) and all(states(model, "alive"))


@pytest.mark.usefixtures("peers")
def test_bits_and_counts_are_those_without_workers(cases: Cases) -> None:
    """The same products in the same order, in bfloat16, too. What is needed is split, none of it is lost or counted
    twice; without evictions the hits are the same.
    """
    case, logits, demands = cases["qwen3_moe"], [], []
    for workers in ({}, *({"workers": num} for num in (1, 3))):
        with loaded(case.folder, dtype="bfloat16", memory="100%", **workers) as model:
            generate(model, case.prompts)
            logits.append(logits_of(model, case.prompts))
            stats = expertly.stats(model).as_dict()
            phases = stats["phases"]
            demands.append([(*counts(model, phase), phases[phase]["demanded_bytes"]) for phase in phases])
            per_device = [[device[phase]["hits"] for phase in phases] for device in stats["devices"]]
            assert [sum(column) for column in zip(*per_device, strict=True)] == [counts(model, p)[0] for p in phases]
    assert all(torch.equal(each, logits[0]) for each in logits)
    assert all(demand == demands[0] for demand in demands)


def test_continuous_batching_and_inference_mode(cases: Cases, peers: list[ThreadPeer]) -> None:
    """Several requests of different lengths share a call; a worker gets the rows that it needs, not all."""
    case = cases["qwen3_moe"]
    prompts = [*make_prompts(2, length=5, seed=2), *make_prompts(1, length=20, seed=3)]
    expected = [generate(load_reference(case.folder), [prompt], 6)[0] for prompt in prompts]
    with loaded(case.store, segments=4, workers=4, memory="25%") as model:
        for _ in range(2):
            assert run_batch(model, prompts) == expected
        engine = handle(model).engine
        num_passes = sum(engine.num_passes.values())
        assert num_passes < 2 * 6 * len(prompts), "requests share passes"
        for peer in peers:
            most = num_passes * engine.executor.geometry.num_layers
            assert peer.kinds.count(Kind.LAYER) <= most, "one call a layer and pass"
        with torch.inference_mode():
            torch.testing.assert_close(logits_of(model, case.prompts), case.logits, rtol=1e-4, atol=1e-5)


# -- workers that die ------------------------------------------------------------------------------------------------


def refused(store: Path, match: str, **settings: Any) -> None:
    with pytest.raises(ConfigError, match=match):
        expertly.load(str(store), **({"workers": 2, "device": "cpu", "memory": "50%"} | settings))
    assert not reader_threads() and not [each for each in threading.enumerate() if each.name.startswith("worker-")]


def at_layer(number: int, do: Callable[[], object]) -> Callable[[Kind], None]:
    """Before a worker's message of this number that asks for a layer."""
    left = [number]

    def before(kind: Kind) -> None:
        if kind is Kind.LAYER:
            left[0] -= 1
            if left[0] == 0:
                do()

    return before


@pytest.mark.parametrize("system", ["lru", "resident"])
def test_a_worker_that_dies_is_computed_for_here(system: str, cases: Cases, peers: list[ThreadPeer]) -> None:
    case = cases["qwen3_moe"]
    with with_workers(case.store, system=system, **({"memory": "100%"} if system == "resident" else {})) as model:
        peers[1].before = at_layer(7, peers[1].kill)
        for _ in range(2):
            assert generate(model, case.prompts) == case.tokens
        assert states(model, "alive") == [True, False]
        assert states(model, "problem")[1] == "the other end closed the connection"
        before = states(model, "bytes_received")
        assert generate(model, case.prompts) == case.tokens
        after = states(model, "bytes_received")
        assert after[0] > before[0] and after[1] == before[1]


@pytest.mark.parametrize("kind", [Kind.LAYER, Kind.STATS])
def test_a_worker_that_stalls_is_computed_for_here(
    kind: Kind, cases: Cases, peers: list[ThreadPeer], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In a layer, or while it is asked for statistics: that asks it once, and not for every layer."""
    case, wake = cases["qwen3_moe"], threading.Event()
    monkeypatch.setattr(remote, "DEADLINE_S", 2.0)  # the other worker answers, on a busy machine too
    with with_workers(case.store) as model:
        assert generate(model, case.prompts) == case.tokens
        peers[0].before = lambda asked: wake.wait() and None if asked is kind else None
        expertly.stats(model).as_dict()
        assert sum(peer.kinds.count(Kind.STATS) for peer in peers) == 2, "once each worker"
        assert generate(model, case.prompts) == case.tokens
        assert "worker w0 was lost: " in caplog.text
        assert ("no answer within its deadline" in caplog.text) == (kind is Kind.LAYER)
        wake.set()
        assert generate(model, case.prompts) == case.tokens
        assert states(model, "alive") == [False, True]
    while reader_threads():  # of those that stalled
        time.sleep(0.01)


def test_a_worker_that_cannot_open_leaves_no_thread_behind(
    cases: Cases, peers: list[ThreadPeer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Shard, "preload", Mock(side_effect=OSError("no disk")))
    refused(cases["qwen3_moe"].store, "workers: w0: OSError: no disk", system="resident", memory="100%")


def test_a_worker_that_fails_is_computed_for_here(
    cases: Cases, peers: list[ThreadPeer], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    case = cases["qwen3_moe"]
    with with_workers(case.store) as model:
        monkeypatch.setattr(peers[0].running.worker, "_run_layer", Mock(side_effect=OSError("Input/output error")))
        assert generate(model, case.prompts) == case.tokens
        assert states(model, "alive") == [False, True]
        assert "worker w0 was lost: OSError: Input/output error" in caplog.text


def test_where_nobody_can_compute_the_request_fails_with_its_cause(copied: tuple[Case, Path], peers: Any) -> None:
    case, store = copied
    with with_workers(store) as model:
        assert generate(model, case.prompts) == case.tokens
        elsewhere = store.with_name("elsewhere")
        store.rename(elsewhere)
        peers[0].kill()
        for _ in range(2):
            with pytest.raises(
                TransferError, match=r"worker w0 was dropped \(.*\), and its experts cannot be computed"
            ):
                generate(model, case.prompts)
        elsewhere.rename(store)
        assert generate(model, case.prompts) == case.tokens


def test_a_layer_that_fails_here_leaves_the_workers_well(
    cases: Cases, peers: list[ThreadPeer], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = cases["qwen3_moe"]
    with with_workers(case.store) as model:
        assert generate(model, case.prompts) == case.tokens
        shard = handle(model).engine.executor.shard
        with monkeypatch.context() as patched:
            patched.setattr(shard, "run_layer", Mock(side_effect=TransferError("read error")))
            with pytest.raises(TransferError, match="read error"):
                generate(model, case.prompts)
        assert generate(model, case.prompts) == case.tokens
        assert all(states(model, "alive"))


# -- workers that are refused ----------------------------------------------------------------------------------------


def test_a_store_is_the_engines_own_wherever_it_lies(
    copied: tuple[Case, Path], peers: list[ThreadPeer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    case, store = copied
    original = worker.open_same_store
    pack(make_checkpoint("qwen3_moe", tmp_path / "other", seed=7), tmp_path / "other-store")
    for folder, message in (
        (tmp_path / "other-store", r"the store at .*other-store differs from the engine's; copy"),
        (tmp_path / "nowhere" / "s", r"no packed store at .*nowhere/s nor at .*; copy it"),
    ):
        monkeypatch.setattr(worker, "open_same_store", lambda _, facts, folder=folder: original(folder, facts))
        refused(store, f"workers: w0: StoreError: {message}")
    shutil.copytree(store, tmp_path / "cache" / "stores" / store.name)
    monkeypatch.setenv("EXPERTLY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(worker, "open_same_store", lambda folder, facts: original(Path("/none") / folder.name, facts))
    with with_workers(store) as model:  # from the worker's own cache
        assert generate(model, case.prompts) == case.tokens
    other = wire.message(Kind.HELLO, {"version": 9, "expert_nbytes": 1})
    with pytest.raises(wire.WorkerFailedError, match=r"messages are of version \d, the engine's of 9; install"):
        wire.parts_of(worker.ExpertWorker().answer(other))


@pytest.mark.usefixtures("peers")
def test_what_cannot_work_is_refused(cases: Cases) -> None:
    for message, settings in (
        (
            "workers: w0 has .* for experts, and system 'resident' keeps all",
            {"system": "resident", "memory": "20%"},
        ),
        ("workers: 8, but a layer has 8 experts; accepted: at most 7", {"workers": 8}),
        ("system='fmoe': it predicts; accepted with workers: one that does not", {"system": "fmoe"}),
    ):
        refused(cases["qwen3_moe"].store, message, **settings)
    with ExitStack() as opened, pytest.raises(ConfigError, match=r"workers=2: they share .*; accepted: with `memory`"):
        start_workers(2, "auto", opened)


# -- who holds what --------------------------------------------------------------------------------------------------


def test_shares_follow_memory(cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory does not hold everything, each has experts in proportion to it; where it does, all have as many."""
    put_in_threads(monkeypatch, "10%", "40%")
    with loaded(cases["qwen3_moe"].store, workers=2, memory="20%", segments=4) as model:
        experts = [each["experts"] for each in expertly.stats(model).as_dict()["devices"]]
        assert experts == [7, 3, 14]
        assert "2 workers compute 70.8% of the experts" in expertly.stats(model).memory_reason
    put_in_threads(monkeypatch, "90%", "90%")
    with loaded(cases["qwen3_moe"].store, workers=2, memory="60%") as model:
        assert [each["experts"] for each in expertly.stats(model).as_dict()["devices"]] == [8, 8, 8]
