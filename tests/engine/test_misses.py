"""Misses shared out between the link and the host: by hand, and in every way that a trace asks for them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from expertly.core.costs import HostCompute, Link
from expertly.core.geometry import Geometry, LayerGeometry
from expertly.core.messages import Phase, RouterRan, Span
from expertly.engine.host import MissSplit
from expertly.scheduler.budget import Budget, split_budget
from expertly.scheduler.loop import run_layer
from expertly.scheduler.scheduler import Scheduler
from expertly.scheduler.systems import get_system
from tests.scheduler.decisions import Decision, record, replay
from tests.scheduler.soak import LAYERS, RandomLink
from tests.tables import seeds

GEOMETRY = Geometry((LayerGeometry(16, 8, 1, 500, 2, 1),))
"""Experts of 1000 bytes, and 2000 operations a token, whose rows have a byte."""

BUDGET = Budget(12_000, (8,), (4,), (4,))
"""Four experts are kept."""


def split(copy_ns: int, host_ns: int, call_ns: int = 0, slowdown: float = 1.0) -> MissSplit:
    """Where an expert takes so long on either side."""
    host = HostCompute(1e12 / host_ns, 1e18, call_ns, slowdown)
    return MissSplit(GEOMETRY, Link(1e12 / copy_ns, 0), host)


@pytest.mark.parametrize(
    ("copy_ns", "host_ns", "call_ns", "misses", "on_host"),
    [
        (400, 100, 0, 5, 4),  # one copy beside four: both end at 400
        (400, 400, 0, 4, 2),
        (400, 400, 0, 1, 0),  # as early: the copy stays in the cache
        (400, 300, 0, 1, 1),
        (400, 300, 100, 1, 0),
        (100, 400, 0, 4, 0),
        (100, 400, 0, 5, 1),
        (100, 350, 0, 8, 1),  # 7 copies end at 700; 6 at 600, beside two at 700
        (100, 10_000, 0, 8, 0),
        (100, 50, 1000, 8, 0),  # what a call costs is never won back
    ],
)
def test_both_sides_end_as_early_as_they_can(
    copy_ns: int, host_ns: int, call_ns: int, misses: int, on_host: int
) -> None:
    assert split(copy_ns, host_ns, call_ns).num_on_host(0, [1] * misses, 1, 0) == on_host


@pytest.mark.parametrize("seed", range(50))
def test_no_other_number_ends_earlier(seed: int) -> None:
    dice = random.Random(seed)
    copy_ns, host_ns, call_ns = dice.randint(1, 999), dice.randint(1, 999), dice.randint(0, 2000)
    misses, coming = dice.randint(0, 16), dice.randint(0, 3)
    one = split(copy_ns, host_ns, call_ns)

    def end_ns(num: int) -> int:
        return max((misses - num + coming) * copy_ns, call_ns + num * host_ns if num else 0)

    found = one.num_on_host(0, [1] * misses, 1, coming)
    assert end_ns(found) <= min(map(end_ns, range(misses + 1))) + 20, "the rows take as long as 17 bytes"


def test_contention_prefetches_and_tokens_count() -> None:
    assert split(400, 400).num_on_host(0, [1] * 4, 1, 0) == 2
    assert split(400, 400, slowdown=2.0).num_on_host(0, [1] * 4, 1, 0) == 3, "copies are slow beside the host"
    assert split(400, 400).num_on_host(0, [1] * 4, 1, 2) == 3, "two prefetches are on the link"
    several = MissSplit(GEOMETRY, Link(2.5e9, 0), HostCompute(2.5e9, 5e9, 0, 1.0))  # 400 ns of either, or of a token
    assert several.num_on_host(0, [1] * 4, 1, 0) == 2
    assert several.num_on_host(0, [4] * 4, 4, 0) == 0, "1600 ns each on the host"
    assert several.num_on_host(0, [1, 1, 4, 4], 4, 0) == 2
    assert several.num_on_host(0, [1, 1, 4, 4], 3000, 0) == 0, "3000 rows are as long as three experts"


def test_one_miss_that_the_host_computes_follows_to_be_kept() -> None:
    """Four experts have room. Of four misses the host computes two; one of them comes behind the others."""
    scheduler = get_system("lru").scheduler(GEOMETRY, BUDGET, split=split(400, 400))
    plan = scheduler.begin_layer(RouterRan(0, [3, 5, 7, 9], [1] * 4, [True] * 4, 1))
    assert {span.expert for span in plan.loads} | set(plan.on_host) == {3, 5, 7, 9}
    assert len(plan.loads) == len(plan.on_host) == 2
    (following,) = plan.following
    assert following.expert in plan.on_host
    for span in plan.loads:
        assert scheduler.loaded(span)
    scheduler.computed(plan.loads)
    scheduler.end_layer()
    scheduler.check()
    assert not scheduler.loaded(following), "nobody waits for it"
    again = scheduler.begin_layer(RouterRan(0, [3, 5, 7, 9], [1] * 4, [True] * 4, 1))
    assert len(again.ready) == 3 and len(again.loads) == 1, "alone, it comes as soon as the host could compute it"
    decode = scheduler.counters[0].decode
    assert (decode.computed_on_host, decode.misses, decode.hits) == (2, 5, 3)
    assert decode.loaded_nbytes == 4000 and decode.prefetched_nbytes == 1000


class CountingHost:
    def __init__(self) -> None:
        self.begun: list[int] = []
        self.is_open = False

    def begin(self, router: RouterRan, experts: Sequence[int]) -> None:
        assert not self.is_open
        self.begun, self.is_open = list(experts), True

    def end(self) -> None:
        assert self.is_open
        self.is_open = False


@pytest.mark.parametrize("seed", seeds(3, 10))
@pytest.mark.parametrize("system", ["lru", "on-demand", "expertly", "static:admission=always"])
def test_random_demands(system: str, seed: int) -> None:
    """Every expert is computed once, here or there, whenever what follows arrives; and every decision is made again."""
    dice = random.Random(f"{system} {seed}")
    geometry = Geometry(LAYERS, dice.choice([1, 4]))
    budget = split_budget(geometry, round(dice.choice([0.4, 0.5, 0.7]) * geometry.nbytes))
    costs = Link(1e9, 0), HostCompute(dice.choice([5e8, 1e9, 4e9]), 1e10, dice.choice([0, 50]), 1.0)

    def make() -> Scheduler:
        return get_system(system).scheduler(geometry, budget, split=MissSplit(geometry, *costs))

    decisions: list[Decision] = []
    plain, link, host = make(), RandomLink(dice, dice.choice([0.05, 0.4])), CountingHost()
    scheduler, num_on_host = record(plain, decisions.append), 0
    for step in range(400):
        layer = step % geometry.num_layers
        shape, is_prompt = geometry.layers[layer], dice.random() < 0.1
        num = dice.randint(shape.top_k, shape.num_experts) if is_prompt else shape.top_k
        experts, tokens = dice.sample(range(shape.num_experts), num), [dice.randint(1, 6) if is_prompt else 1] * num
        computed: Counter[int] = Counter()

        def compute(spans: Sequence[Span], computed: Counter[int] = computed) -> None:
            computed.update({span.expert: span.num_segments for span in spans})

        host.begun = []
        router = RouterRan(layer, experts, tokens, [not is_prompt] * num, sum(tokens) // shape.top_k)
        run_layer(scheduler, link, router, compute, host=host)
        assert not host.is_open and not set(host.begun) & set(computed)
        num_on_host += len(host.begun)
        computed.update(dict.fromkeys(host.begun, geometry.segments_per_expert))
        assert computed == dict.fromkeys(experts, geometry.segments_per_expert)
        plain.check()
    counted = [one.of(phase).computed_on_host for one in plain.counters for phase in Phase]
    assert num_on_host == sum(counted) > 0
    assert replay(decisions, make()) is None
