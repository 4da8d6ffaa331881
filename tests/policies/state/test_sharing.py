"""What others have learned is added once, checked, and told apart from one's own."""

from __future__ import annotations

import numpy as np
import pytest

from expertly.core.errors import StoreError
from expertly.policies.learned import ModelShape
from expertly.policies.predictor.eam.matrices import Matrices
from expertly.policies.predictor.fmoe.store import MapStore
from expertly.policies.state.sharing import absorb, digests_of, like
from tests.policies.state.builders import SHAPE, make_store


def test_what_is_new_is_added_and_what_is_known_is_not() -> None:
    mine, theirs = make_store(6, seed=1), make_store(8, seed=2)
    other = like(mine, theirs.state())
    assert absorb(mine, other, digests_of(mine), 256) == 8
    assert mine.num_maps == 14
    assert digests_of(theirs) < digests_of(mine)
    assert absorb(mine, other, digests_of(mine), 256) == 0
    assert mine.num_maps == 14


def test_digests_survive_being_stored_again() -> None:
    """Else what one has told comes back as new, without end."""
    theirs = make_store(8, seed=2)
    mine = make_store(0)
    absorb(mine, like(mine, theirs.state()), set(), 256)
    assert digests_of(mine) == digests_of(theirs)


def test_requests_of_others_are_nobodys_here() -> None:
    mine, theirs = make_store(6, seed=1), make_store(8, seed=2)
    before = set(mine.requests[:6].tolist())
    absorb(mine, like(mine, theirs.state()), set(), 256)
    new = mine.requests[6:14].tolist()
    assert not before & set(new) and max(new) < 0
    old = theirs.requests[:8]
    np.testing.assert_array_equal(np.equal.outer(new, new), np.equal.outer(old, old), "grouped as they were")


def test_into_a_full_store_only_the_newest_go() -> None:
    mine, theirs = make_store(20, capacity=20, seed=1), make_store(12, seed=2)
    assert absorb(mine, like(mine, theirs.state()), set(), 3) == 3
    assert mine.num_maps == 20
    newest = np.argsort(theirs.born[:12])[-3:]
    assert mine.born.max() >= 22
    for slot in newest:
        assert any(np.array_equal(mine.maps[:, one], theirs.maps[:, slot]) for one in range(20))


def test_a_store_with_room_takes_all_that_fits() -> None:
    mine, theirs = make_store(0, capacity=20), make_store(12, seed=2)
    assert absorb(mine, like(mine, theirs.state()), set(), 3) == 12


def matrices(seed: int, num: int = 3, capacity: int = 8) -> Matrices:
    dice = np.random.default_rng(seed)
    made = Matrices(SHAPE, capacity)
    is_expert = np.arange(SHAPE.max_experts) < np.array(SHAPE.num_experts)[:, None]
    for _ in range(num):
        for phase in (made.prefill, made.decode):
            phase.add(dice.integers(0, 9, is_expert.shape) * is_expert)
    return made


def test_matrices_are_shared_by_phase() -> None:
    mine, theirs = matrices(1), matrices(2)
    other = like(mine, theirs.state())
    assert absorb(mine, other, digests_of(mine), 256) == 6
    assert (mine.prefill.num_matrices, mine.decode.num_matrices) == (6, 6)
    np.testing.assert_array_equal(mine.decode.matrices[3:6], theirs.decode.matrices[:3])
    assert absorb(mine, other, digests_of(mine), 256) == 0


@pytest.mark.parametrize("kind", ["other shape", "other width", "missing", "other kind", "not a number"])
def test_what_is_of_another_model_is_refused(kind: str) -> None:
    mine = make_store(4)
    state = dict(make_store(4, seed=1).state())
    if kind == "other shape":
        state = dict(MapStore(ModelShape((4,), (1,))).state())
    elif kind == "other width":
        state = dict(make_store(4, hidden_size=7).state())
    elif kind == "not a number":
        state["maps"] = np.full_like(state["maps"], np.nan)
    elif kind == "missing":
        del state["chosen"]
    else:
        state = matrices(1).state()
    with pytest.raises(StoreError):
        like(mine, state)
