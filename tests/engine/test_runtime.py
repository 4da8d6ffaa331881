"""How a forward pass begins: choices grouped by expert, threads that compute beside readers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

import expertly
from expertly.api import handle
from expertly.core.errors import TransferError
from expertly.core.observation import IterationInfo
from expertly.engine import runtime as compute_threads
from expertly.engine.runtime import MAX_TOKENS_PER_EXPERT, dispatch
from expertly.lab.model_profile import measure_model
from expertly.model.hooks import experts_modules
from tests.engine.conftest import Case, Cases
from tests.engine.failing import FailOnce, replace_reads
from tests.engine.observe import loaded
from tests.families import generate


def info(is_prefill: list[bool], is_pad: list[bool] | None = None) -> IterationInfo:
    return IterationInfo(
        is_prefill=np.array(is_prefill),
        is_pad=None if is_pad is None else np.array(is_pad),
        num_requests=1,
        phase="prefill" if any(is_prefill) else "decode",
    )


def test_a_single_token_keeps_the_router_order() -> None:
    work = dispatch(3, torch.tensor([[5, 0, 7]]), 8, info([False]))
    assert work.router.layer == 3
    assert work.router.experts == [5, 0, 7]
    assert work.router.num_tokens == [1, 1, 1] and work.router.is_decode == [True] * 3
    assert work.positions == {5: 0, 0: 1, 7: 2} and work.rows is None


def test_many_tokens_list_experts_by_first_choice_and_rows_by_token() -> None:
    work = dispatch(0, torch.tensor([[4, 1], [1, 2], [4, 2]]), 8, info([True] * 3))
    assert work.router.experts == [4, 1, 2]
    assert work.router.num_tokens == [2, 2, 2] and work.router.batch_tokens == 3
    assert work.router.is_decode == [False] * 3
    assert work.rows is not None
    assert {e: rows.tolist() for e, rows in work.rows.items()} == {4: [0, 4], 1: [1, 2], 2: [3, 5]}


def test_pads_are_computed_but_not_counted() -> None:
    work = dispatch(0, torch.tensor([[6, 1], [1, 2]]), 8, info([True, True], [True, False]))
    assert work.router.experts == [6, 1, 2]
    assert work.router.num_tokens == [0, 1, 1] and work.router.batch_tokens == 1
    assert work.rows is not None and work.rows[6].tolist() == [0]


def test_a_mixed_batch_marks_what_a_decoding_request_needs() -> None:
    work = dispatch(0, torch.tensor([[0, 1], [1, 2], [2, 3]]), 8, info([True, True, False]))
    assert dict(zip(work.router.experts, work.router.is_decode, strict=True)) == {
        0: False,
        1: False,
        2: True,
        3: True,
    }


pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def four_of_eight(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine of eight processors, on which torch would use six."""
    monkeypatch.setattr(compute_threads, "granted_cpus", lambda: 8)
    with threads(6):
        yield


@contextmanager
def threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def seen_by(model: Any) -> list[int]:
    """The threads of each call of the first layer's experts from now on."""
    seen: list[int] = []
    experts_modules(model)[0].register_forward_pre_hook(lambda *_: seen.append(torch.get_num_threads()))
    return seen


def beside(model: Any) -> dict[str, int]:
    found: dict[str, int] = expertly.stats(model).as_dict()["compute_threads"]
    return found


def test_passes_leave_readers_their_processors(planes: Case) -> None:
    with loaded(planes.store, system="lru", memory="50%") as model:
        seen = seen_by(model)
        assert generate(model, planes.prompts) == planes.tokens
        assert set(seen) == {4} and len(seen) == beside(model)["passes_with_fewer"] > 1
        assert beside(model)["beside_decoders"] == 4
        assert torch.get_num_threads() == 6, "what runs between passes has all of them"


def test_a_prompt_that_computes_longer_than_it_decodes_has_all(planes: Case) -> None:
    with loaded(planes.store, system="lru", memory="50%") as model, torch.no_grad():
        config = model.config
        threads = handle(model).engine.threads
        assert threads is not None and threads.max_tokens_per_expert == pytest.approx(
            MAX_TOKENS_PER_EXPERT / 2, rel=0.1
        )
        most = int(threads.max_tokens_per_expert * config.num_experts / config.num_experts_per_tok)
        seen = seen_by(model)
        for length in (most, most + 1):
            model(torch.ones(1, length, dtype=torch.long), use_cache=False)
        assert seen == [4, 6] and beside(model)["passes_with_fewer"] == 1


@pytest.mark.parametrize(("system", "memory"), [("lru", "75%"), ("resident", "100%")])
def test_where_hardly_anything_is_decoded_all_compute(system: str, memory: str, planes: Case) -> None:
    with loaded(planes.store, system=system, memory=memory) as model:
        assert_all_compute(model, planes, 6)
        assert beside(model)["passes_with_fewer"] == 0


@pytest.mark.parametrize("number", [1, 4])
def test_fewer_that_a_user_has_set_stay(number: int, planes: Case) -> None:
    with threads(number), loaded(planes.store, system="lru", memory="50%") as model:
        assert_all_compute(model, planes, number)
        assert beside(model)["passes_with_fewer"] == 0


def assert_all_compute(model: Any, case: Case, number: int) -> None:
    seen = seen_by(model)
    assert generate(model, case.prompts, 3) == [tokens[:3] for tokens in case.tokens]
    assert set(seen) == {number}


def test_a_pass_that_fails_gives_them_back(planes: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    with loaded(planes.store, system="lru", memory="50%") as model:
        fail = FailOnce(3)
        replace_reads(monkeypatch, lambda *args: fail(*args))
        with pytest.raises(TransferError):
            generate(model, planes.prompts)
        assert torch.get_num_threads() == 6
        assert generate(model, planes.prompts) == planes.tokens


def test_costs_are_measured_with_the_threads_of_passes(planes: Case, cases: Cases) -> None:
    for case, number in ((planes, 4), (cases["qwen3_moe"], 6)):
        with loaded(case.store, system="lru", memory="50%") as model:
            assert measure_model(model, seconds=0.0, tokens=(1, 8)).compute.num_threads == number
            assert torch.get_num_threads() == 6
