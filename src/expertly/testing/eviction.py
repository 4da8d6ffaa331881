"""What every eviction policy promises (policies/eviction.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from expertly.policies.eviction import EvictionPolicy
from expertly.policies.known import NOTHING, Known
from expertly.testing.made_up import expect, small_model

MODEL = small_model(layers=16, experts=64, top_k=2)

Make = Callable[[int], EvictionPolicy]
"""The policy of a cache of so many experts of MODEL. Two of them know nothing of each other."""


def check_eviction(policy: type[EvictionPolicy], known: Known = NOTHING) -> None:
    """Run all of EVICTION_CHECKS. Raises AssertionError naming the promise that is not kept."""
    for check in EVICTION_CHECKS:
        check(lambda capacity: policy.make(MODEL, capacity, known))


def every_kept_expert_is_named_once_and_no_other(make: Make) -> None:
    policy = make(8)
    _admit(policy, [5, 1, 7, 3])
    policy.removed(7)
    policy.used([9], [4], 4)  # not kept
    _expect_kept(policy, [1, 3, 5])


def what_is_protected_is_never_named_and_naming_changes_nothing(make: Make) -> None:
    policy = make(8)
    _expect_kept(policy, [])
    _admit(policy, range(8))
    victims = list(policy.victims({2, 4}))
    expect(not {2, 4} & set(victims), "what is protected is no victim", victims)
    next(iter(policy.victims(set())))
    _expect_kept(policy, range(8))


def protection_changes_no_order(make: Make) -> None:
    """One that draws its order anew each time it is asked has none."""
    first, second, third = (make(2) for _ in range(3))
    for policy in (first, second, third):
        _admit(policy, [5, 1, 7, 3, 8, 2])
        policy.used([7, 5], [2, 3], 4)
    if len({tuple(third.victims(())) for _ in range(10)}) > 1:
        return
    left = [expert for expert in first.victims(()) if expert not in (1, 8)]
    expect(left == list(second.victims({1, 8})), "victims come in one order, whatever is protected", left)


def an_expert_can_go_and_come_back(make: Make) -> None:
    policy = make(8)
    for _ in range(3):
        _admit(policy, [4, 2])
        policy.removed(4)
        _expect_kept(policy, [2])
        policy.removed(2)
        _expect_kept(policy, [])


def being_used_by_pads_alone_is_no_use(make: Make) -> None:
    used, unused = make(2), make(2)
    for policy in (used, unused):
        _admit(policy, [3, 1, 2])
    used.used([3, 1], [0, 0], 0)
    victims = list(used.victims(()))
    expect(victims == list(unused.victims(())), "an expert that served no token was not used", victims)


def what_is_predicted_may_come_at_any_time_and_changes_no_membership(make: Make) -> None:
    policy, num_of_layer = make(8), MODEL.layers[0].num_experts
    for admitted, removed, share in (((), (), 0.1), ([5, 1, 7, 3], (), 0.5), ((), [7], 0.0)):
        policy.predicted(0, [share, 0.4, share, *[0.0] * (num_of_layer - 3)])
        policy.expected([share * (expert % 2) for expert in range(MODEL.num_experts)])
        _admit(policy, admitted)
        for expert in removed:
            policy.removed(expert)
    policy.predicted(0, [0.9] * num_of_layer)
    _expect_kept(policy, [1, 3, 5])


def equal_histories_give_equal_victims(make: Make) -> None:
    first, second = (_history(make(6)) for _ in range(2))
    expect(first == second, "of two policies that saw the same the victims are the same")


EVICTION_CHECKS = (
    every_kept_expert_is_named_once_and_no_other,
    what_is_protected_is_never_named_and_naming_changes_nothing,
    protection_changes_no_order,
    an_expert_can_go_and_come_back,
    being_used_by_pads_alone_is_no_use,
    what_is_predicted_may_come_at_any_time_and_changes_no_membership,
    equal_histories_give_equal_victims,
)


def _history(policy: EvictionPolicy) -> list[list[int]]:
    """The victims of 300 uses with room for six."""
    dice, kept, history = Random(3), list[int](), []
    for _ in range(300):
        expert = dice.randrange(20)
        if expert not in kept and len(kept) == 6:
            history.append(list(policy.victims({expert})))
            if not history[-1]:
                continue
            kept.remove(history[-1][0])
            policy.removed(history[-1][0])
        if expert not in kept:
            kept.append(expert)
            policy.admitted(expert)
        policy.used([expert], [1], 1)
    return history


def _admit(policy: EvictionPolicy, experts: Sequence[int]) -> None:
    for expert in experts:
        policy.admitted(expert)
        policy.used([expert], [1], 1)


def _expect_kept(policy: EvictionPolicy, kept: Sequence[int]) -> None:
    named = list(policy.victims(set()))
    expect(sorted(named) == list(kept), "what is kept is named once each, and nothing else", named)
