"""MoEpic: layers keep the tops of many experts and prefetch the rest; a configurator gives memory to the layers that
wait longest without it. In the order of the paper, whose sections and equations are named; equation 4 is in lcp.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from expertly.core.geometry import Geometry
from expertly.core.messages import Prediction, RouterRan
from expertly.policies.allocation import Allocation, equal_quotas, uniform_quotas, whole_tops
from expertly.policies.base import PolicyOptions, option
from expertly.policies.known import NOTHING, Known
from expertly.policies.lcp import CachePriority, LCPOptions
from expertly.policies.lookahead import Lookahead, LookaheadOptions

Doubles = npt.NDArray[np.float64]
Ints = npt.NDArray[np.intp]

# -- 3.1: expert split ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SplitOptions(PolicyOptions):
    theta: float = option(0.5, "the part of an expert that is kept of it, from its top", above=0, most=1)


class SplitExperts(Allocation):
    """Equal quotas; of each kept expert the first segments, theta of it: rounded to the nearest number, a half down, at
    least one. Layers that keep some of every expert and have more room keep more of each.
    """

    name = "split"
    options: ClassVar[type[Any]] = SplitOptions
    needs_layers = True
    splits = True

    def __init__(self, geometry: Geometry, options: Any = SplitOptions(), known: Known = NOTHING) -> None:
        super().__init__(geometry)
        self._top = max(1, math.ceil(options.theta * geometry.segments_per_expert - 0.5))

    def quotas(self, kept_slots: Sequence[int]) -> list[int]:
        """Whole tops, as equal as can be; equal segments where there is more than the tops of all experts."""
        geometry = self.geometry
        num_experts = geometry.class_sums([layer.num_experts for layer in geometry.layers])
        has_more = [slots >= self._top * num for slots, num in zip(kept_slots, num_experts, strict=True)]
        equal, of_tops = equal_quotas(geometry, kept_slots), uniform_quotas(geometry, kept_slots, self._top)
        return [equal[i] if has_more[size_class] else of_tops[i] for i, size_class in enumerate(geometry.size_classes)]

    def tops(self, quotas: Sequence[int]) -> list[int] | None:
        if self._top == self.geometry.segments_per_expert:
            return None
        pairs = zip(quotas, self.geometry.layers, strict=True)
        return [max(self._top, quota // layer.num_experts) for quota, layer in pairs]


# -- 3.2: speculative prefetcher, equation 3 -----------------------------------------------------------------------


@dataclass(frozen=True)
class SpeculativeOptions(LookaheadOptions):
    """Options of `speculative`, whose `width` is all experts, unless said."""

    next_token: bool = option(True, "past the last layer, too: the first layers, as the next token will run them")


class Speculative(Lookahead):
    """Names every expert of a layer, so that loading continues down the scores, past the K that the router will choose,
    until it has chosen. It predicts the first layer from the last one of the token before.
    """

    name = "speculative"
    options = SpeculativeOptions

    def __init__(self, geometry: Geometry, distance: int, options: SpeculativeOptions, known: Known) -> None:
        most = max(layer.num_experts for layer in geometry.layers)
        super().__init__(geometry, distance, replace(options, width=options.width or most), known)


# -- 3.4.1: how long loads can hide behind computing, equations 5 to 7 ---------------------------------------------


@dataclass(frozen=True, slots=True)
class Timing:
    """Times of the parts of one decode step; sequences are over the L layers, times at least 0.

    `loaded` below is the paper's m: how many of the K needed experts, in parts of experts, are on the device when the
    router has run. With alpha experts there whole and beta as tops of theta, m = alpha + beta * theta; as alpha + beta
    + gamma = K, the paper's beta * (1 - theta) + gamma is K - m.
    """

    top_k: Sequence[int]
    attention_ns: Sequence[int]  # what a layer does before its experts
    moe_ns: Sequence[int]  # its K experts, everything being there
    load_ns: Sequence[int]  # one whole expert, from host to device
    head_ns: int  # what comes between the last layer and the next token's first

    def first_window_ns(self) -> float:
        """T_wind of the first layer: prefetching for it begins when the last layer of the token before is done."""
        return float(self.head_ns + self.attention_ns[0])

    def next_window_ns(self, layer: int, loaded: float) -> float:
        """T_wind of the layer after `layer`: it begins when `layer` has loaded all that it needs (equation 7)."""
        hidden = min(self._hide_ns(layer, loaded), self._miss_ns(layer, loaded))
        return self.moe_ns[layer] - hidden + (*self.attention_ns, self.head_ns)[layer + 1]

    def exposed_ns(self, layer: int, loaded: float) -> float:
        """T: the part of loading that no computing hides (equation 6)."""
        return max(0.0, self._miss_ns(layer, loaded) - self._hide_ns(layer, loaded))

    def _hide_ns(self, layer: int, loaded: float) -> float:
        """T_hide: computing what has been loaded (equation 5)."""
        return loaded * (self.moe_ns[layer] / self.top_k[layer])

    def _miss_ns(self, layer: int, loaded: float) -> float:
        """T_miss: loading what has not."""
        return (self.top_k[layer] - loaded) * float(self.load_ns[layer])


# -- 3.4.2: how well experts could be cached, and how well they are predicted --------------------------------------


class LayerRates(NamedTuple):
    """The rates of one layer, E experts. An expert's rank is its place, from 0, by falling cache priority."""

    hits: Doubles  # [E+1] H(C), C = 0..E: share of the needed experts whose rank was below C
    accuracy: Doubles  # [E] P(y) at y - 1: share of tokens that needed the expert of the y-th highest predicted score
    predicted_hits: Doubles  # [E, E+1] PH(y, C) at y - 1: share of the tokens in which that expert's rank was below C


class LayerStatistics:
    """Gathers the rates of one layer over all tokens from the first on, as algorithm 1 does. Memory: 8 bytes * E * E.

    Ranks are those before a token updates them, as a cache finds them. Ties, of ranks and of predicted scores, go to
    the lowest id; experts that were never used come last.
    """

    def __init__(self, num_experts: int, priority: LCPOptions | None = None) -> None:
        """`priority`: of the caches, by which experts are ranked."""
        self._priority = CachePriority(priority or LCPOptions())
        self._num_tokens = 0
        self._num_used = [0] * num_experts
        self._scores = np.full(num_experts, np.inf)  # minus the cache priority
        self._ranks: Ints = np.arange(num_experts)  # by `_scores`
        self._places: Ints = np.arange(num_experts)
        self._needed = np.zeros(num_experts)  # needed experts by their rank
        self._num_predicted = 0  # tokens that had a prediction
        self._right = np.zeros(num_experts)  # of those, which needed the y-th predicted one
        self._joint = np.zeros((num_experts, num_experts))  # [y, rank of the y-th predicted one]

    @property
    def ranked(self) -> list[int]:
        """The experts that were used, by falling cache priority."""
        num_used = int(np.isfinite(self._scores).sum())
        ranked: list[int] = self._scores.argsort(kind="stable")[:num_used].tolist()
        return ranked

    def note(self, needed: Sequence[int], predicted: Sequence[int] | None = None) -> None:
        """A token: the experts that it needs, none twice, and the predicted ones by falling score, where there was a
        prediction; experts that it does not name come last.
        """
        is_needed = np.zeros(len(self._places), np.bool_)
        is_needed[list(needed)] = True
        self._needed[self._ranks[is_needed]] += 1
        if predicted is not None:
            order = np.array(predicted, np.intp)
            if len(order) < len(self._places):
                order = np.concatenate([order, np.setdiff1d(self._places, order)])
            self._right[is_needed[order]] += 1
            self._joint[self._places, self._ranks[order]] += 1
            self._num_predicted += 1
        self._num_tokens += 1
        for expert in needed:
            self._num_used[expert] += 1
            self._scores[expert] = -self._priority(self._num_used[expert], self._num_tokens)
        self._ranks[self._scores.argsort(kind="stable")] = self._places

    def rates(self) -> LayerRates:
        """The rates observed so far; copies. Before any token each expert is needed as often as any other."""
        hits, num_predicted = _sums(self._needed), self._num_predicted or 1
        shares = hits / max(1.0, hits[-1]) if self._num_tokens else np.linspace(0, 1, len(hits))
        return LayerRates(shares, self._right / num_predicted, _sums(self._joint) / num_predicted)


# -- 3.4.2: the sub-problem, how a layer best splits its budget, equations 8 to 11 ---------------------------------

_ROUNDING = 1e-9  # of sums of shares: a prefetch that just fits must not fail for their last bits


class LayerSplit(NamedTuple):
    """The experts of highest cache priority keep their first `top` segments each."""

    kept_experts: int  # C
    top: int  # theta * P: V / C, rounded down; 0 where nothing is kept
    loaded: float  # m: experts' worth of what is needed that is there when the router has run
    exposed_ns: float  # T


class LayerProblem:
    """The sub-problem of one layer, for any budget and window."""

    def __init__(self, rates: LayerRates, layer: int, timing: Timing, num_segments: int) -> None:
        predicted_hits = rates.predicted_hits.T  # [E+1, E] by C, then y
        # Sums over the first Y predicted experts, [C, Y]: of PH, and of PH * P; and of P, [Y]
        self._hits_of_first = _sums(predicted_hits)
        self._joint_of_first = _sums(predicted_hits * rates.accuracy)
        self._needed_of_first = _sums(rates.accuracy)
        self._hits = rates.hits
        self._experts: Ints = np.arange(len(rates.hits))  # C; and Y
        self._layer, self._timing, self._num_segments = layer, timing, num_segments

    def best(self, budget: int, window_ns: float) -> LayerSplit:
        """The split of a budget of so many segments with the highest m (equation 11); of equal ones that which keeps
        most of what is needed, then the fewest experts. What theta's rounding leaves of the budget is not counted on.
        """
        timing, layer, experts = self._timing, self._layer, self._experts
        top_k, load_ns = timing.top_k[layer], timing.load_ns[layer]
        tops = np.minimum(budget // np.maximum(experts, 1), self._num_segments)
        tops[0] = 0
        theta = tops / self._num_segments
        cached = top_k * self._hits * theta  # A_cache (equation 8)
        # As many as the window and the buffer of K experts hold (equation 9); what they take never falls with Y.
        room = max(0.0, min(top_k, window_ns / load_ns if load_ns > 0 else top_k)) + _ROUNDING
        count = (experts - theta[:, None] * self._hits_of_first <= room).sum(axis=1) - 1  # Y of each C
        prefetched = self._needed_of_first[count] - theta * self._joint_of_first[experts, count]  # equation 10
        loaded = np.minimum(cached + prefetched, top_k)
        best = int(np.lexsort((-experts, cached, loaded))[-1])
        top, most = int(tops[best]), float(loaded[best])
        return LayerSplit(best if top else 0, top, most, timing.exposed_ns(layer, most))


def _sums(shares: Doubles) -> Doubles:
    """Sums of the first 0..E along the last axis, [..., E+1]."""
    sums = np.zeros((*shares.shape[:-1], shares.shape[-1] + 1))
    np.cumsum(shares, axis=-1, out=sums[..., 1:])
    return sums


# -- 3.4.2: the budgets of layers, algorithm 1 ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Configuration:
    """What layers may use, in segments, and how each splits it."""

    budgets: tuple[int, ...]  # V
    splits: tuple[LayerSplit, ...]

    @property
    def exposed_ns(self) -> float:
        return sum(split.exposed_ns for split in self.splits)


def expert_split(problems: Sequence[LayerProblem], budgets: Sequence[int], timing: Timing) -> Configuration:
    """ExpertSplit of algorithm 1: each layer's window follows from the layer before."""
    window, splits = timing.first_window_ns(), []
    for layer, (problem, budget) in enumerate(zip(problems, budgets, strict=True)):
        splits.append(problem.best(budget, window))
        window = timing.next_window_ns(layer, splits[-1].loaded)
    return Configuration(tuple(budgets), tuple(splits))


def configure(
    geometry: Geometry, kept_segments: Sequence[int], problems: Sequence[LayerProblem], timing: Timing, zeta: float
) -> Iterator[Configuration | None]:
    """VramAllocation of algorithm 1, for so many kept segments in each size class, without staging slots: from equal
    budgets, moves a share zeta of the memory from the layer that loses least to the one that gains most, as long as the
    sum of exposed time falls. The paper's layers are of one size; here each size class moves its own.

    Yields None after each step, which splits every layer once or twice, and the configuration in the end.
    """
    now = expert_split(problems, equal_quotas(geometry, kept_segments), timing)
    size_class = 0
    while size_class < geometry.num_size_classes:
        yield None
        unit = max(1, round(zeta * kept_segments[size_class]))
        budgets = yield from _moved(geometry, geometry.layers_of_class(size_class), unit, problems, timing, now)
        then = now if budgets is None else expert_split(problems, budgets, timing)
        if then.exposed_ns < now.exposed_ns:
            now, size_class = then, 0
        else:
            size_class += 1
    yield now


def _moved(
    geometry: Geometry,
    layers: Sequence[int],
    unit: int,
    problems: Sequence[LayerProblem],
    timing: Timing,
    now: Configuration,
) -> Generator[None, None, list[int] | None]:
    """Budgets with a unit moved (lines 17 to 21); None: no two layers can give and take one. No layer that has memory
    is left without any, none gets more than its experts fill.
    """
    most = [layer.num_experts * geometry.segments_per_expert for layer in geometry.layers]
    more, less = ([budget + sign * unit for budget in now.budgets] for sign in (1, -1))
    with_more = expert_split(problems, [min(pair) for pair in zip(more, most, strict=True)], timing).splits
    yield
    with_less = expert_split(problems, [max(0, budget) for budget in less], timing).splits
    yield
    exposed_ns = [split.exposed_ns for split in now.splits]
    gains = {i: exposed_ns[i] - with_more[i].exposed_ns for i in layers if more[i] <= most[i]}
    losses = {i: with_less[i].exposed_ns - exposed_ns[i] for i in layers if less[i] >= min(1, now.budgets[i])}
    taker = max(gains, key=gains.__getitem__, default=-1)
    losses.pop(taker, None)
    if taker < 0 or not losses:
        return None
    budgets = list(now.budgets)
    budgets[taker] += unit
    budgets[min(losses, key=losses.__getitem__)] -= unit
    return budgets


# -- the allocation ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MoEpicOptions(PolicyOptions):
    tau: int = option(5000, "decoded tokens between two configurations", least=1)
    zeta: float = option(0.01, "share of what is kept that moves at a time", above=0, below=1)


class MoEpic(SplitExperts):
    """Starts as `split` with theta 0.5. After every tau decoded tokens a configuration is due (algorithm 1). It is made
    between layers, a step with every one that runs, from what all tokens needed and what had been predicted of it, and
    counts from the end of the pass in which it was done: layers shrink at once, and load the best of what they have
    room for behind everything else.

    A pass over several tokens counts as one that needs the experts of all of them, since who chose which is not known
    here. Prompts do not count: a configuration is for decode.
    """

    name = "moepic"
    options = MoEpicOptions
    is_configured = True
    is_online = True

    def __init__(self, geometry: Geometry, options: MoEpicOptions = MoEpicOptions(), known: Known = NOTHING) -> None:
        super().__init__(geometry, SplitOptions(), known)
        self._options = options
        priority = known.get(LCPOptions)
        self._seen = [LayerStatistics(layer.num_experts, priority) for layer in geometry.layers]
        self._predicted: list[Prediction | None] = [None] * geometry.num_layers  # the newest of each layer
        self._kept_slots: list[int] = []
        self._num_tokens = 0
        self._due = options.tau  # tokens after which a configuration is due
        self._work: Iterator[Configuration | None] | None = None
        self._done: Configuration | None = None  # what the work ended with, until it is taken
        self._tops: list[int] | None = None  # as configured
        self._num_configurations = 0

    def tops(self, quotas: Sequence[int]) -> list[int] | None:
        return super().tops(quotas) if self._tops is None else self._tops

    def begin(self, quotas: Sequence[int]) -> None:
        self._kept_slots = self.geometry.class_sums(quotas)

    def predicted(self, prediction: Prediction) -> None:
        self._predicted[prediction.layer] = prediction

    @property
    def is_due(self) -> bool:
        return self._work is None and self._num_tokens >= self._due

    def configure(self, timing: Timing) -> None:
        num_segments = self.geometry.segments_per_expert
        problems = [LayerProblem(seen.rates(), layer, timing, num_segments) for layer, seen in enumerate(self._seen)]
        self._work = configure(self.geometry, self._kept_slots, problems, timing, self._options.zeta)

    def ran(self, router: RouterRan, recall: Callable[[int], float]) -> list[int] | None:
        layer = router.layer
        prediction, self._predicted[layer] = self._predicted[layer], None
        is_last = layer == self.geometry.num_layers - 1
        if router.serves_decode:
            every = zip(router.experts, router.num_tokens, router.is_decode, strict=True)
            needed = [expert for expert, num, is_decode in every if num and is_decode]
            self._seen[layer].note(needed, None if prediction is None else prediction.experts)
            if is_last:  # a prompt's tokens do not count
                self._num_tokens += router.batch_tokens if False not in router.is_decode else 1
        if self._work is not None and self._done is None:
            self._done = next(self._work)
        return self._take(self._done) if is_last and self._done is not None else None

    def best_of(self, layer: int) -> Sequence[int]:
        return self._seen[layer].ranked

    def _take(self, done: Configuration) -> list[int]:
        """Layers keep this from now on. One whose budget holds more tops than its split has keeps these, too."""
        self._work = self._done = None
        self._due += self._options.tau
        self._num_configurations += 1
        self._tops = [split.top or self.geometry.segments_per_expert for split in done.splits]
        every = zip(done.budgets, self._tops, self.geometry.layers, strict=True)
        return [whole_tops(budget, top, shape.num_experts) for budget, top, shape in every]

    def facts(self) -> dict[str, object]:
        """`learned`: from how much; `configurations`: how often what is kept was worked out anew."""
        learned = f"online, from {self._num_tokens} decoded tokens"
        return {"learned": learned, "configurations": self._num_configurations}
