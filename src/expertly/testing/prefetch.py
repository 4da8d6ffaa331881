"""What every prefetch order promises (policies/prefetch.py)."""

from __future__ import annotations

from expertly.policies.prefetch import PrefetchOrder
from expertly.testing.expect import expect


def check_prefetch(order: type[PrefetchOrder]) -> None:
    """Of one layer, the surer never comes later. Raises AssertionError otherwise."""
    priority = order.make().priority
    for layers_to_go in (1, 2, 7):
        found = [priority(score, layers_to_go) for score in (0.0, 0.1, 0.5, 0.9, 1.0)]
        expect(found == sorted(found), f"a priority never falls with the score ({layers_to_go} layers to go)", found)
