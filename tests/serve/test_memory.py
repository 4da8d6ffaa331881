"""How memory is divided."""

from __future__ import annotations

from dataclasses import replace

import pytest

from expertly.core.errors import BudgetError
from expertly.serve.memory import PAGE_TOKENS, Shape, split_total

GIB = 1 << 30
CONFIG = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
SHAPE = Shape(CONFIG, itemsize=2, dense=3 * GIB, all_experts=80 * GIB, context=4096, max_running=16)


@pytest.mark.parametrize("total_gib", [6, 8, 12, 24, 64])
def test_nothing_is_given_twice_and_nothing_is_left(total_gib: int) -> None:
    split = split_total(total_gib * GIB, SHAPE)
    used = split.dense + split.cache + split.working + split.experts
    assert used == total_gib * GIB
    assert split.num_pages * PAGE_TOKENS >= SHAPE.context, "one text always fits"
    assert split.num_pages <= SHAPE.pages_wanted()
    assert split.experts > 0


def test_experts_have_most_of_what_can_be_chosen() -> None:
    split = split_total(12 * GIB, SHAPE)
    assert split.experts >= 2.5 * split.cache


def test_a_cache_takes_what_experts_do_not_need() -> None:
    small = replace(SHAPE, all_experts=2 * GIB)
    split = split_total(24 * GIB, small)
    assert split.experts == 2 * GIB and split.num_pages == SHAPE.pages_wanted()
    tight = split_total(8 * GIB, small)
    assert tight.experts == pytest.approx(2 * GIB, rel=0.02)
    assert split_total(8 * GIB, SHAPE).num_pages < tight.num_pages


def test_a_stated_cache_is_kept() -> None:
    assert split_total(24 * GIB, SHAPE, stated_pages=200).num_pages == 200


def test_too_little_names_the_least() -> None:
    with pytest.raises(BudgetError, match="the least is above") as raised:
        split_total(3 * GIB, SHAPE)
    least = int(str(raised.value).split()[-2])
    assert split_total(least + (1 << 20), SHAPE).experts >= 0
