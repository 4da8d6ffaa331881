"""The least a demand-only cache must load, by trying everything: for cases small enough."""

from __future__ import annotations

from itertools import combinations


def least_loads(demands: list[frozenset[int]], capacities: dict[int, int], of_cache: dict[int, int]) -> int:
    """Items loaded over `demands`, each served in turn from what is kept; what is missing is loaded.

    After a demand any of (kept + demanded) may be kept, as many as `capacities` of each item's cache (`of_cache`).
    """
    total = 0
    for cache, capacity in capacities.items():
        items = {item for item, c in of_cache.items() if c == cache}
        costs: dict[frozenset[int], int] = {frozenset(): 0}
        for demand in demands:
            mine = demand & items
            following: dict[frozenset[int], int] = {}
            for kept, cost in costs.items():
                paid = cost + len(mine - kept)
                pool = sorted(kept | mine)
                for after in combinations(pool, min(capacity, len(pool))):
                    key = frozenset(after)
                    following[key] = min(paid, following.get(key, paid))
            costs = following
        total += min(costs.values())
    return total
