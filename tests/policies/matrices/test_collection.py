from __future__ import annotations

import numpy as np
import pytest

from expertly.core.errors import ConfigError, StoreError
from expertly.policies.learned import ModelShape
from expertly.policies.predictor.eam.matrices import DEFAULT_CAPACITY, MAX_COUNT, Collection, Matrices
from tests.policies.matrices.reference import SHAPE, choices, matrix_of


def filled(num: int, capacity: int = 20, seed: int = 0) -> Collection:
    dice, collection = np.random.default_rng(seed), Collection(SHAPE, capacity)
    for _ in range(num):
        collection.add(matrix_of(choices(dice, 3)))
    return collection


def test_the_papers_capacity() -> None:
    assert (DEFAULT_CAPACITY, Collection(SHAPE).capacity, Matrices(SHAPE).decode.capacity) == (120, 120, 120)


def test_a_request_without_tokens_is_left_out() -> None:
    collection = Collection(SHAPE, 3)
    collection.add(np.zeros((5, 7), np.int64))
    assert (collection.num_matrices, collection.generation) == (0, 0)


def test_counts_that_float32_cannot_count_are_taken_for_the_most_it_can() -> None:
    collection = Collection(SHAPE, 1)
    collection.add(np.full((5, 7), 1 << 40))
    assert (collection.matrices == MAX_COUNT).all() and (collection.total == MAX_COUNT).all()
    collection.add(np.ones((5, 7), np.int64))
    assert (collection.total == 1).all(), "it replaced the other"


@pytest.mark.parametrize("num", [0, 7, 50])
def test_state_and_back(num: int) -> None:
    collection = filled(num)
    other = Collection.from_state(SHAPE, collection.state(), 20)
    for name in ("matrices", "columns", "squares", "inverse_norms", "total"):
        np.testing.assert_array_equal(getattr(other, name), getattr(collection, name), err_msg=name)
    matrix = matrix_of(choices(np.random.default_rng(9), 2))
    for one in (collection, other):
        one.add(matrix)
    np.testing.assert_array_equal(other.born, collection.born)
    np.testing.assert_array_equal(other.matrices, collection.matrices)


def test_a_smaller_one_keeps_what_is_unlike() -> None:
    large, small = filled(20), Collection(SHAPE, 6)
    small.extend(large)
    assert small.num_matrices == 6 and large.num_matrices == 20
    stored = {matrix.tobytes() for matrix in large.matrices}
    assert all(matrix.tobytes() in stored for matrix in small.matrices)
    assert small.matrices[small.born.argmax()].tobytes() == large.matrices[19].tobytes(), "the newest is there"


@pytest.mark.parametrize("capacity", [0, -1, 1 << 21])
def test_a_capacity_that_cannot_be(capacity: int) -> None:
    with pytest.raises(ConfigError, match=rf"capacity={capacity}: must be from 1 to"):
        Collection(SHAPE, capacity)
    with pytest.raises(ConfigError, match=r"matrices of \d+ bytes; at most"):
        Collection(ModelShape((9000,) * 90, (1,) * 90), 1 << 20)


def test_states_that_do_not_fit_are_refused() -> None:
    state = filled(5).state()
    with pytest.raises(StoreError, match="5 matrices: more than the capacity of 4"):
        Collection.from_state(SHAPE, state, 4)
    with pytest.raises(StoreError, match="array 'matrices' has shape"):
        Collection.from_state(SHAPE, state | {"matrices": state["matrices"][:, :3]}, 9)


def test_both_phases_together() -> None:
    matrices = Matrices(SHAPE, 20)
    matrices.prefill.extend(filled(3))
    matrices.decode.extend(filled(5, seed=1))
    assert (matrices.num_matrices, matrices.most_of_a_phase, matrices.generation) == (8, 5, 8)
    assert matrices.of_phase(True) is matrices.prefill and matrices.of_phase(False) is matrices.decode
    other = Matrices(SHAPE, 4)
    other.extend(matrices)
    assert (other.prefill.num_matrices, other.decode.num_matrices, other.capacity) == (3, 4, 4)
