"""Collections of activation matrices, and the matrices nearest to a pass."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from expertly.core.errors import ConfigError
from expertly.policies.learned import ModelShape
from expertly.policies.moe_infinity import Collection, Match
from tests.policies.predictor.naive import SHAPE, NaiveCollection, choices, cosine, matrix_of


def filled(num: int, capacity: int = 20, seed: int = 0) -> Collection:
    dice, collection = np.random.default_rng(seed), Collection(SHAPE, capacity)
    for _ in range(num):
        collection.add(matrix_of(choices(dice, 3)))
    return collection


@pytest.mark.parametrize("num", [0, 50])
def test_state_and_back(num: int) -> None:
    collection = filled(num)
    other = Collection(SHAPE, 20)
    other.fill(collection.matrices, collection.born[: collection.num_matrices])
    for name in ("columns", "squares", "total"):
        np.testing.assert_array_equal(getattr(other, name), getattr(collection, name), err_msg=name)
    matrix = matrix_of(choices(np.random.default_rng(9), 2))
    for one in (collection, other):
        one.add(matrix)
    np.testing.assert_array_equal(other.born, collection.born)
    np.testing.assert_array_equal(other.columns, collection.columns)


def test_a_capacity_that_memory_cannot_hold_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"matrices of \d+ bytes; at most"):
        Collection(ModelShape((9000,) * 90, (1,) * 90), 1 << 20)


@pytest.mark.parametrize("layers", [range(5), [0, 1, 3, 4], [2, 3], [4]])
@pytest.mark.parametrize(("capacity", "num_tokens"), [(1, 2), (6, 1), (6, 40), (60, 2)])
def test_in_lock_step_with_the_formulas(capacity: int, num_tokens: int, layers: list[int]) -> None:
    """Requests come, replace each other and are matched, m at a time, layer by layer, with what they ran before and
    without; some layers are left out.
    """
    dice = np.random.default_rng(capacity)
    collection, naive = Collection(SHAPE, capacity), NaiveCollection(capacity)
    recent = []
    for number in range(24):
        matrix = matrix_of(choices(dice, int(dice.integers(1, 4))))
        if number % 7 == 3:
            matrix = recent[-2]  # the same again
        recent.append(matrix)
        collection.add(matrix)
        naive.add(matrix)
        assert collection.num_matrices == len(naive.matrices)
        by_age = np.argsort(collection.born[: collection.num_matrices])
        np.testing.assert_array_equal(collection.matrices[by_age], naive.matrices)
        np.testing.assert_array_equal(collection.total, np.sum(naive.matrices, axis=0))
        if number % 5 != 3:
            continue
        running = matrix_of(choices(dice, num_tokens))
        earlier = [np.zeros_like(running), matrix_of(choices(dice, 5))]
        for num, before in product((1, 3, 100), earlier):
            match, seen = Match(collection, before), sorted({*np.flatnonzero(before.any(axis=1)).tolist()})
            total = before.copy()
            assert (match.nearest(num) is None) == (not naive.nearest(total, seen, num)), "nothing has been seen"
            for layer in layers:
                match.observe(layer, running[layer])
                total[layer] += running[layer]
                seen = sorted({*seen, layer})
                found = match.nearest(num)
                wanted = naive.nearest(total, seen, num)
                if not wanted:
                    assert found is None
                    continue
                assert found is not None
                assert list(found.slots) == sorted(int(by_age[at]) for at in wanted)
                best = max(cosine(total[seen], matrix[seen]) for matrix in naive.matrices)
                assert found.cosine == pytest.approx(best, abs=1e-6) and found.cosine <= 1
