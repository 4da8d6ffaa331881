"""Keeps the experts that are used again soonest, as three predictions say: a linear model of nearby layers' routing,
what followed similar steps, and each expert's own past. They learn while the model runs, and each counts as much as it
has been right lately (ours).

`Reuse` orders one cache. The caches of one model share a `ReuseModel`, whose arithmetic is reuse.c.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import accumulate
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt

from expertly.core.compiled import compiled
from expertly.core.geometry import Geometry, ModelShape
from expertly.core.messages import RouterRan
from expertly.policies.base import NO_OPTIONS
from expertly.policies.eviction import DenseScoredPolicy, MakePolicy
from expertly.policies.known import NOTHING, Known

Floats = npt.NDArray[np.float32]

DISCOUNT = 0.9  # of a use that is one step later
HORIZON = 8  # steps after which a value is compared with the uses that followed; later uses are taken to be as frequent
FADING = np.exp(-1 / 2)  # by which a token's part in the inputs shrinks with each token
REACH = 4  # layers before and after a layer whose inputs it uses

RATE = 0.03  # of learning: the share of its error by which a value changes if the same inputs come again
BATCH = 4  # steps that are learned from together: one product of matrices is cheaper than four of vectors
MEAN_RATE = 1e-3  # of the means of inputs, per token; higher while few tokens have been seen
MOST_WEIGHTS = 1 << 18  # of a layer: with many experts it uses the inputs of fewer layers, at least its own
SURE = 100.0
"""Added, in a prompt, to the values of layers yet to run; above any value, since a prompt needs nearly all experts."""

NEAR_DISCOUNT = 0.8
"""The discount of what followed similar steps, and where predictions are weighed; lower, so that an expert that is used
often does not hide one that is about to be used once.
"""
WEIGHED = 300  # tokens over which predictions are weighed; older ones fade
STEPS = 512  # of decode that are compared with the running one
SHARPNESS = 25.0  # by how much a step that chose the same experts counts more (logarithm) than one without any of them
CARRIED = 0.5  # how much the step before counts in that comparison
KNOWN = 1000  # tokens over which the worth of each class of own past is averaged
MEANS_KNOWN = 100  # tokens that a trace's means of inputs count for, since its workload may have used other experts

_SUM_OF_DISCOUNTS = 1 / (1 - DISCOUNT)
_LEAST_NORM = 1e-3
_AGES = (*range(8), *(num << octave for octave in range(8) for num in (8, 10, 12, 14)))
"""Steps since the last use (0 in the step itself): the most of each class but the last."""
_AGE_CLASSES = np.searchsorted(_AGES, np.arange(_AGES[-1] + 2)).astype(np.int64)  # class of 0, 1, 2, ... steps
_LEAST_OCTAVE = -13
_NUM_RATES = -2 * _LEAST_OCTAVE
_RATES = (2.0 ** (np.arange(1, _NUM_RATES) / 2 + _LEAST_OCTAVE)).astype(np.float32)  # the least of each class but one
_FADING_OF_RATES = np.float32((1 - MEAN_RATE) ** BATCH)
_FIRST_SEEN = 4.0  # uses that the initial worth of a class counts for
_FIRST_WEIGHTS = np.array([0.3, 0.0, 0.5])  # of the model, similar steps and own past
_RIDGE = 5.0  # how firmly the first weights are held to, in squares of values
_VERSION = 1
"""Of the interface of reuse.c, which has the same number."""


def _worth_of_uses(discount: float) -> Floats:
    """[HORIZON]: the worth of a use after 1, 2, ... steps."""
    weights = discount ** np.arange(HORIZON, dtype=np.float64) / (1 - discount**HORIZON)
    return weights.astype(np.float32)


_USES, _NEAR_USES = _worth_of_uses(DISCOUNT), _worth_of_uses(NEAR_DISCOUNT)


class ReuseModel:
    """A value for each expert of a layer: the expected sum of DISCOUNT ** (k - 1) over the steps k from now on that
    need it. The inputs are the shares of the last tokens that the experts of this layer and of nearby layers served (of
    later layers, up to the step before). Weights follow from what was then needed.

    Every step costs a product of a layer's weights with a vector. Every few steps the weights are updated.
    """

    max_rows: int | None = 8192  # of a training part: more teach little, and take seconds

    def __init__(self, shape: ModelShape) -> None:
        self.shape = shape
        self.mean: Floats = np.zeros(sum(shape.num_experts), np.float32)  # of all inputs, by dense id
        self._values: Floats = np.zeros(sum(shape.num_experts), np.float32)  # as computed when each layer ran last
        self._library = compiled_reuse()
        self.weights: list[Floats] = []  # of each layer, [E, S]
        self._rows: list[Floats] = []  # the same, [S, E filled up to whole vectors]: sums over S are sums of rows
        places = _places(shape.num_experts)
        for first, num, first_seen, num_seen in places:
            self._rows.append(np.zeros((num_seen, -(-num // 8) * 8), np.float32))
            self.weights.append(self._rows[-1][:, :num].T)
            self.weights[-1][:] = np.eye(num, num_seen, first - first_seen)  # the value is its own recent use
        self._state = self._begin(places)
        self.num_tokens = [0] * shape.num_layers  # that each layer has seen
        self._discounts = list(map(self._discount, range(shape.num_layers)))  # of every expert, seen from each layer
        self._worth: Floats | None = self._values  # of the running layer, once it was asked for
        self._layer = 0  # the running one, or the last that ran
        self._is_decode = True

    def _begin(self, places: Sequence[tuple[int, int, int, int]]) -> ctypes.c_void_p:
        """The state of reuse.c where nothing has been seen."""
        num_layers = self.shape.num_layers
        pairs = zip(places, self._rows, strict=True)
        layers = np.array([(*place, rows.ctypes.data) for place, rows in pairs], np.int64)
        ages = np.array([*_AGES, 2 * _AGES[-1]])
        rates = 2.0 ** (np.arange(_NUM_RATES) / 2 + _LEAST_OCTAVE)
        # What each class of own past is worth before anything was seen: recent and frequent use most.
        first = (0.75 / (1 + ages) + 1.5 * rates[:, None]).clip(0, 1).reshape(-1)
        sizes = BATCH, HORIZON, num_layers, STEPS, len(_AGE_CLASSES), len(ages), _NUM_RATES
        arrays = layers, self.mean, self._values, _AGE_CLASSES, _RATES, first, _FIRST_WEIGHTS, _USES, _NEAR_USES
        numbers = (
            *(FADING, RATE, _LEAST_NORM, MEAN_RATE, _SUM_OF_DISCOUNTS, SHARPNESS, CARRIED, _RIDGE, _FIRST_SEEN),
            *(_FADING_OF_RATES, *(np.exp(-BATCH / (tokens * num_layers)) for tokens in (WEIGHED, KNOWN))),
        )
        parameters = struct.pack("7q9P12d", *sizes, *(array.ctypes.data for array in arrays), *numbers)
        nbytes = self._library.reuse_begin(None, parameters)
        assert nbytes, "reuse.c is of other sizes"
        memory = np.zeros(nbytes + 64, np.uint8)
        state = ctypes.c_void_p(-(-memory.ctypes.data // 64) * 64)
        self._library.reuse_begin(state, parameters)
        self._pointed_to = memory, arrays
        return state

    def observe(self, router: RouterRan) -> None:
        """A layer is about to run. Prompts move the inputs; only decode updates weights."""
        self._layer, self._worth = router.layer, None
        self._is_decode = router.is_part_of_decode or True in router.is_decode
        if router.batch_tokens:
            num = len(router.experts)
            numbers = struct.pack(f"{2 * num}i", *router.experts, *router.num_tokens)
            observe = self._library.reuse_observe
            observe(self._state, router.layer, num, numbers, router.batch_tokens, self._is_decode)
            self.num_tokens[router.layer] += router.batch_tokens

    def worth(self) -> Floats:
        """The value of every expert by dense id, as seen from the running layer: a layer that has yet to run in this
        step is nearer than one that has run. Callers must not write it.
        """
        if self._worth is None:
            self._worth = self._values * self._discounts[self._layer]
            if not self._is_decode:
                self._worth[sum(self.shape.num_experts[: self._layer + 1]) :] += SURE
        return self._worth

    def _discount(self, layer: int) -> Floats:
        num_layers = self.shape.num_layers
        ahead = (np.arange(num_layers) - layer - 1) % num_layers + 1
        return np.repeat(NEAR_DISCOUNT ** (ahead / num_layers), self.shape.num_experts).astype(np.float32)

    def begin_with(self, trained: ReuseModel) -> None:
        """Continue with the weights of another model of these layers, which has seen a trace; nothing has been seen
        yet. Steps that the other has yet to learn from are left out.
        """
        self.mean[:] = trained.mean
        self.num_tokens = list(trained.num_tokens)
        for weights, before in zip(self.weights, trained.weights, strict=True):
            weights[:] = before
        num_known = np.minimum(self.num_tokens, MEANS_KNOWN).astype(np.int64)
        self._library.reuse_restored(self._state, num_known.ctypes.data)


@cache
def compiled_reuse() -> SimpleNamespace:
    """The functions of reuse.c. They keep the interpreter lock: they take microseconds, and getting it back from a
    thread that computes may take milliseconds. Raises ConfigError where they were not compiled.
    """
    pointer, number = ctypes.c_void_p, ctypes.c_int
    functions = {
        "reuse_begin": (ctypes.c_size_t, (pointer, ctypes.c_char_p)),
        "reuse_observe": (None, (pointer, number, number, ctypes.c_char_p, ctypes.c_int64, number)),
        "reuse_restored": (None, (pointer, pointer)),
    }
    return compiled("policies/_reuse", _VERSION, functions, ctypes.PyDLL)


def _places(num_experts: Sequence[int]) -> list[tuple[int, int, int, int]]:
    """For each layer the first dense id and the number of its experts, and of those whose inputs it uses: of as many
    layers as MOST_WEIGHTS allows.
    """
    ends, places = [0, *accumulate(num_experts)], []
    for layer, num in enumerate(num_experts):
        first_seen, num_seen = ends[layer], num
        for reach in range(1, REACH + 1):
            begin, end = ends[max(0, layer - reach)], ends[min(len(num_experts), layer + reach + 1)]
            if (end - begin) * num <= MOST_WEIGHTS:
                first_seen, num_seen = begin, end - begin
        places.append((ends[layer], num, first_seen, num_seen))
    return places


class Reuse(DenseScoredPolicy):
    """The score is the model's value, as seen from the layer that ran last. A cache that holds all experts of the model
    learns nothing, since it never evicts.
    """

    name = "reuse"
    needs_best = True

    def __init__(self, geometry: Geometry, model: ReuseModel, capacity: int) -> None:
        super().__init__(geometry)
        self._model = model  # that all caches share
        self._has_choice = capacity < geometry.num_experts

    @classmethod
    def of_model(cls, geometry: Geometry, known: Known = NOTHING, texts: Mapping[str, str] = NO_OPTIONS) -> MakePolicy:
        """The caches share one model, which starts from a known one of the same layers, or with nothing learned."""
        cls.parse(texts)
        shared, taught = ReuseModel(ModelShape.of(geometry)), known.get(ReuseModel)
        if taught is not None and taught.shape.num_experts == shared.shape.num_experts:
            shared.begin_with(taught)
        return lambda capacity, layers: cls(geometry, shared, capacity)

    @classmethod
    def training(cls, geometry: Geometry) -> ReuseModel:
        return ReuseModel(ModelShape.of(geometry))

    def needed(self, experts: Sequence[int], router: RouterRan) -> None:
        if self._has_choice:
            self._model.observe(router)

    def all_scores(self) -> Floats:
        return self._model.worth()
