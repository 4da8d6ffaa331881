"""MoE-Infinity in the engine: lossless, and its matrices outlive the model that learned them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import expertly
from expertly.api import handle
from expertly.core.errors import StoreError
from expertly.engine import prediction as prediction_module
from expertly.policies.eviction.eam import EAMEviction
from expertly.policies.learned import read_learned
from expertly.policies.predictor.eam.matrices import Matrices
from expertly.scheduler.decisions import replay_file
from expertly.store.cache import list_entries, remove_entry
from tests.engine.conftest import Case, Cases
from tests.engine.observe import loaded, reader_threads
from tests.engine.test_batching import run_batch
from tests.families import NUM_EXPERTS, generate, load_reference, logits_of, make_prompts

pytestmark = pytest.mark.timeout(120)

SYSTEM = "moe-infinity"


def stats_of(model: Any) -> dict[str, Any]:
    found = expertly.stats(model).as_dict()
    assert isinstance(found, dict)
    return found


def of_phases(model: Any, name: str) -> int:
    """A counter, over both phases."""
    return sum(int(phase[name]) for phase in stats_of(model)["phases"].values())


def learn(store: Path, case: Case, **kwargs: Any) -> int:
    """Load, generate, unload; the matrices that were read at the start."""
    with loaded(store, **({"system": SYSTEM, "maps": "auto"} | kwargs)) as model:
        assert generate(model, case.prompts) == case.tokens
        return int(stats_of(model)["prediction"]["maps_read"])


@pytest.mark.parametrize("matcher", ["thread", "inline"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "jamba", "switch_transformers"])
def test_tokens_and_logits_are_those_of_the_reference(family: str, matcher: str, cases: Cases) -> None:
    case = cases[family]
    with loaded(case.store, system=SYSTEM, memory="30%", segments=4, matcher=matcher) as model:
        for _ in range(3):  # from the second on there are matrices
            assert generate(model, case.prompts) == case.tokens
        torch.testing.assert_close(logits_of(model, case.prompts), case.logits, rtol=1e-4, atol=1e-5)
        facts = stats_of(model)["prediction"]
        assert facts["failed"] is None and facts["predictor"]["prefill_matrices"] > 0
        assert of_phases(model, "predicted") > 0
        if matcher == "inline" and family != "switch_transformers":  # beside the pass it may be late; there it is here
            assert of_phases(model, "prefetched") > 0
        assert stats_of(model)["memory_bytes"] < stats_of(model)["expert_bytes"]


def test_batches_are_lossless_whose_requests_come_and_go(cases: Cases) -> None:
    case = cases["qwen3_moe"]
    prompts = [*make_prompts(2, length=5, seed=2), *make_prompts(1, length=20, seed=3)]
    reference = load_reference(case.folder)
    expected = [generate(reference, [prompt], 6)[0] for prompt in prompts]
    with loaded(case.store, system=SYSTEM, memory="50%", matcher="inline") as model:
        for _ in range(2):
            assert run_batch(model, prompts) == expected
        assert stats_of(model)["prediction"]["predictor"]["searches"] > 0


def test_what_goes_is_what_the_matrices_say(cases: Cases) -> None:
    """Experts were evicted by algorithm 1, of the outlook that the predictor gave last."""
    case = cases["qwen3_moe"]
    with loaded(case.store, system=SYSTEM, memory="50%", matcher="inline") as model:
        for _ in range(3):
            generate(model, case.prompts[:1])
        scheduler = handle(model).engine.scheduler
        policy = scheduler.cache.partitions[0].policy
        assert isinstance(policy, EAMEviction) and policy._has_outlook
        assert policy._likely.any() and of_phases(model, "evicted_bytes") > 0


def test_what_was_decided_is_decided_again(cases: Cases, tmp_path: Path) -> None:
    case, path = cases["mixtral"], tmp_path / "decisions.jsonl"
    model, _ = expertly.load(
        str(case.store), system=SYSTEM, memory="50%", decisions=path, matcher="inline", maps="off", device="cpu"
    )
    for _ in range(3):
        assert generate(model, case.prompts) == case.tokens
    expertly.unload(model)
    calls = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    outlooks = [call[1][-1] for call in calls if call[0] == "predict" and isinstance(call[1][-1], list)]
    assert any(len(outlook) == 3 * NUM_EXPERTS for outlook in outlooks), "of all three layers"
    assert replay_file(path)[1].difference is None


# -- saved and reloaded ----------------------------------------------------------------------------------------------


def test_auto_is_beside_the_store_in_a_file_of_its_own(own: tuple[Case, Path]) -> None:
    """Each kind has its own; each is found again and left alone by the other's system."""
    case, store = own
    assert learn(store, case) == 0
    assert sorted(os.listdir(store.parent)) == ["store", "store.matrices"]
    matrices = store.with_name("store.matrices")
    before = matrices.read_bytes()
    assert learn(store, case, system="fmoe") == 0
    assert sorted(os.listdir(store.parent)) == ["store", "store.maps", "store.matrices"]
    assert matrices.read_bytes() == before
    num = len(case.prompts)
    with loaded(store, system=SYSTEM, maps="auto", matcher="inline") as model:
        facts = stats_of(model)["prediction"]
        assert (facts["maps_read"], facts["history"], facts["maps_file"]) == (2 * num, "warm", str(matrices))
        generate(model, case.prompts, 1)
        assert stats_of(model)["prediction"]["predictor"]["searches"] > 0, "at the first token"
    found = read_learned(matrices, Matrices).learned
    prompts = sum(map(len, case.prompts))
    assert found.prefill.total.sum(axis=1)[0] >= prompts, "what was running when it was unloaded is there"


def test_nothing_learned_is_nothing_written(own: tuple[Case, Path]) -> None:
    case, store = own
    learn(store, case)
    path = store.with_name("store.matrices")
    before = path.stat().st_mtime_ns
    with loaded(store, system=SYSTEM, maps="auto"):
        pass
    assert path.stat().st_mtime_ns == before
    for maps in (None, "off"):
        assert learn(store, case, maps=maps) == 0
    assert path.stat().st_mtime_ns == before


@pytest.mark.parametrize("damage", ["truncated", "altered", "maps"])
def test_a_file_that_is_not_what_it_should_be(damage: str, own: tuple[Case, Path]) -> None:
    """Named, it is an error; else the model starts cold, says so, and replaces the file."""
    case, store = own
    path = store.with_name("store.matrices")
    if damage == "maps":
        learn(store, case, system="fmoe", maps=path)
        expected = "format='expertly-maps'"
    else:
        learn(store, case)
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 2] ^= 1
        path.write_bytes(raw[:-5] if damage == "truncated" else raw)
        expected = r"store\.matrices"
    with pytest.raises(StoreError, match=expected):
        learn(store, case, maps=path)
    assert not reader_threads()
    with pytest.warns(UserWarning, match=rf"starting without activation matrices.*{expected}"):
        assert learn(store, case) == 0
    assert learn(store, case) > 0, "it was replaced"


def test_matrices_are_refused_as_maps(own: tuple[Case, Path]) -> None:
    case, store = own
    learn(store, case)
    with pytest.raises(StoreError, match="format='expertly-matrices'"):
        learn(store, case, system="fmoe", maps=store.with_name("store.matrices"))


def test_a_smaller_capacity_than_the_files(own: tuple[Case, Path]) -> None:
    """It is read as far as it fits, and not replaced by less."""
    case, store = own
    learn(store, case)
    path = store.with_name("store.matrices")
    before = path.read_bytes()
    with (
        pytest.warns(UserWarning, match=r"store\.matrices has \d+ activation matrices, capacity=1: what is learned"),
        loaded(store, system=f"{SYSTEM}:capacity=1", maps="auto") as model,
    ):
        assert stats_of(model)["prediction"]["predictor"]["decode_matrices"] == 1
        assert generate(model, case.prompts) == case.tokens
    assert path.read_bytes() == before


def test_a_failed_write_leaves_the_old_file(own: tuple[Case, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    case, store = own
    learn(store, case)
    path = store.with_name("store.matrices")
    before = path.read_bytes()

    def fail(*args: Any) -> None:
        raise StoreError("disk full")

    monkeypatch.setattr("expertly.engine.learned.save_learned", fail)
    with pytest.warns(UserWarning, match="not saved: disk full"):
        learn(store, case)
    assert path.read_bytes() == before


def test_they_are_written_while_the_model_runs(own: tuple[Case, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    case, store = own
    monkeypatch.setattr(prediction_module, "SAVE_EVERY_S", 0.05)
    path = store.with_name("store.matrices")
    with loaded(store, system=SYSTEM, maps="auto") as model:
        for _ in range(2):  # those of the first are over when the second begins
            generate(model, case.prompts)
        end = time.monotonic() + 20
        while not path.exists():
            assert time.monotonic() < end
            time.sleep(0.01)
        assert read_learned(path, Matrices).learned.num_matrices > 0
        assert generate(model, case.prompts) == case.tokens


def test_they_go_with_the_cached_store(cases: Cases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = cases["qwen3_moe"]
    monkeypatch.setenv("EXPERTLY_CACHE", str(tmp_path))
    learn(case.folder, case)
    learn(case.folder, case, system="fmoe")
    (entry,) = list_entries()
    names = sorted(os.listdir(tmp_path / "stores"))
    assert names == [entry.name, f"{entry.name}.maps", f"{entry.name}.matrices"]
    remove_entry(entry.name)
    assert not os.listdir(tmp_path / "stores")
