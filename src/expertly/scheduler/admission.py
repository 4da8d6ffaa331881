"""The admission `best`: of what is kept and what a layer needs, keep what is worth most."""

from __future__ import annotations

from collections.abc import Iterable

from expertly.core.messages import RouterRan
from expertly.policies.eviction.base import ScoredPolicy
from expertly.scheduler.keeper import Keeper, highest_bits


def keep_best(keeper: Keeper, router: RouterRan, needed: list[int], guessed: Iterable[int]) -> dict[int, int]:
    """Decide what is kept from now on; of each expert that `router` needs the mask that is. The rest passes: where
    the layer keeps tops of experts, all behind them.

    What was kept and is to pass stays in its slots until it is computed: no more of it than the ring has room for.
    Nothing of `guessed` goes. Experts are dense ids.
    """
    layer = router.layer
    cache, top = keeper.caches[layer], keeper.tops[layer]
    policy, kept = cache.policy, cache.kept
    assert isinstance(policy, ScoredPolicy), "only scores compare what is kept with what is not"
    policy.needed(needed, router)
    wanted = {eid: top | kept.get(eid, 0) for eid in needed}  # of other tops before there may be more
    excess = sum((top & ~kept.get(eid, 0)).bit_count() for eid in needed) - cache.room
    if excess > 0:
        others = policy.scored_victims({*needed, *guessed})
        other = next(others, None)
        own = sorted([(policy.score(eid), eid) for eid in needed], reverse=True)
        can_pass = keeper.ring_room(layer)
        while excess and (own or other):
            if not own or (other and other <= own[-1]):
                assert other is not None
                eid = other[1]
                gone = highest_bits(kept[eid], excess)
                keeper.evict(eid, gone)
                other = next(others, None)
            else:
                eid = own.pop()[1]
                new = top & ~kept.get(eid, 0)
                gone = highest_bits(new | highest_bits(wanted[eid] & ~new, can_pass), excess)
                wanted[eid] &= ~gone
                can_pass -= (gone & ~new).bit_count()
            excess -= gone.bit_count()
        for eid, mask in wanted.items():
            passing = kept.get(eid, 0) & ~mask
            if passing:
                keeper.let_pass(layer, eid, passing)
    for eid, mask in wanted.items():
        new = mask & ~kept.get(eid, 0)
        if new:
            keeper.keep(layer, eid, new)
    return wanted
