"""The router's tensors become lists for the control plane and rows for the arithmetic."""

from __future__ import annotations

import numpy as np
import torch

from expertly.core.observation import IterationInfo
from expertly.engine.runtime import dispatch


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


def test_choices_that_are_no_expert_are_dropped_and_said_so() -> None:
    work = dispatch(0, torch.tensor([[8, 1], [1, 8]]), 8, info([True, True]))
    assert work.router.experts == [1] and not work.covers_all_rows
    single = dispatch(0, torch.tensor([[8]]), 8, info([False]))
    assert single.router.experts == [] and not single.covers_all_rows
