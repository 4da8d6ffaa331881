"""Keeps the experts that are used again soonest, as three predictions say: a linear model of nearby layers' routing,
what followed similar steps, and each expert's own past. They learn while the model runs, and each counts as much as it
has been right lately (ours).

`Reuse` orders one cache. The caches of one model share a `ReuseModel`. Its arithmetic is reuse.c where that was
compiled at installation, else `NumpyReuse`: a `LayerReuse` for each layer and, for all layers, one `SimilarSteps` and
one `OwnPast`.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from expertly.core.geometry import Geometry
from expertly.core.messages import RouterRan
from expertly.policies.base import NO_OPTIONS
from expertly.policies.eviction import DenseScoredPolicy, MakePolicy
from expertly.policies.known import NOTHING, Known, Training
from expertly.policies.learned import Arrays, LearnedState, ModelShape, Sizes, Tensor

Floats = npt.NDArray[np.float32]

# Kept weights are of these four: learned.VERSION changes with them.
DISCOUNT = 0.9  # of a use that is one step later
HORIZON = 8  # steps after which a value is compared with the uses that followed; later uses are taken to be as frequent
FADING = np.exp(-1 / 2)  # by which a token's part in the inputs shrinks with each token
REACH = 4  # layers before and after a layer whose inputs it uses

RATE = 0.03  # of learning: the share of its error by which a value changes if the same inputs come again
BATCH = 4  # steps that are learned from together: one product of matrices is cheaper than four of vectors
MEAN_RATE = 1e-3  # of the means of inputs, per token; higher while few tokens have been seen
MAX_TOKENS = 1 << 53
MAX_WEIGHT = 1e6  # far above any that is learned, so that a file's weights do not overflow
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
MEANS_KNOWN = 100  # tokens that a file's means of inputs count for, since its workload may have used other experts

_SUM_OF_DISCOUNTS = 1 / (1 - DISCOUNT)
_LEAST_NORM = 1e-3
_ROUNDING = 1e-3  # by which a file's mean share of tokens may exceed 1
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


class ReuseModel(LearnedState):
    """A value for each expert of a layer: the expected sum of DISCOUNT ** (k - 1) over the steps k from now on that
    need it. The inputs are the shares of the last tokens that the experts of this layer and of nearby layers served (of
    later layers, up to the step before). Weights follow from what was then needed.

    Every step costs a product of a layer's weights with a vector. Every few steps the weights are updated.
    """

    kind = "reuse"
    unit = "tokens"
    tensors = {  # noqa: RUF012 - of A experts, W weights
        "tokens": Tensor("I64", "L", 0, MAX_TOKENS),
        "mean": Tensor("F32", "A", 0, 1 + _ROUNDING),
        "weights": Tensor("F32", "W", -MAX_WEIGHT, MAX_WEIGHT),
    }

    def __init__(self, geometry: Geometry) -> None:
        self.shape = ModelShape.of(geometry)
        num_experts = geometry.num_experts
        self._mean: Floats = np.zeros(num_experts, np.float32)  # of all inputs, by dense id
        self._values: Floats = np.zeros(num_experts, np.float32)  # as computed when each layer ran last
        library = compiled_reuse()
        self._arithmetic = (
            NumpyReuse(self.shape.num_experts, self._mean, self._values)
            if library is None
            else CompiledReuse(library, self.shape.num_experts, self._mean, self._values)
        )
        self._num_tokens = [0] * self.shape.num_layers  # that each layer has seen
        self._discounts: dict[int, Floats] = {}  # running layer -> discount of every expert's value
        self._worth: Floats | None = self._values
        self._layer = 0  # the running one, or the last that ran
        self._is_decode = True

    def observe(self, router: RouterRan) -> None:
        """A layer is about to run. Prompts move the inputs; only decode updates weights."""
        self._layer, self._worth = router.layer, None
        self._is_decode = router.is_part_of_decode or True in router.is_decode
        if router.batch_tokens:
            self._arithmetic.observe(router, is_decode=self._is_decode)
            self._num_tokens[router.layer] += router.batch_tokens

    def worth(self) -> Floats:
        """The value of every expert by dense id, as seen from the running layer: a layer that has yet to run in this
        step is nearer than one that has run. Callers must not write it.
        """
        if self._worth is None:
            self._worth = self._values * self._discount(self._layer)
            if not self._is_decode:
                self._worth[sum(self.shape.num_experts[: self._layer + 1]) :] += SURE
        return self._worth

    def state(self) -> dict[str, npt.NDArray[Any]]:
        """Copies of `tokens` that each layer has seen, [L], the `mean` of all inputs, by dense id, and all `weights`,
        layer after layer. Steps that it has yet to learn from are not part of it.
        """
        return {
            "tokens": np.array(self._num_tokens, np.int64),
            "mean": self._mean.copy(),
            "weights": np.concatenate([weights.reshape(-1) for weights in self._arithmetic.weights]),
        }

    def restore(self, arrays: Arrays) -> None:
        self._mean[:] = arrays["mean"]
        self._num_tokens = arrays["tokens"].tolist()
        ends = list(accumulate(weights.size for weights in self._arithmetic.weights))
        for weights, part in zip(self._arithmetic.weights, np.split(arrays["weights"], ends[:-1]), strict=True):
            weights[:] = part.reshape(weights.shape)
        self._arithmetic.restored([min(num, MEANS_KNOWN) for num in self._num_tokens])

    def sizes(self) -> Sizes:
        num_weights = sum(weights.size for weights in self._arithmetic.weights)
        return {"A": (len(self._mean),) * 2, "W": (num_weights,) * 2}

    @property
    def num_learned(self) -> int:
        """Tokens seen by the layer that saw most."""
        return max(self._num_tokens)

    @property
    def generation(self) -> int:  # type: ignore[override]
        return self.num_learned

    def _discount(self, layer: int) -> Floats:
        if layer not in self._discounts:
            num_layers = len(self._num_tokens)
            ahead = (np.arange(num_layers) - layer - 1) % num_layers + 1
            discounts = np.repeat(NEAR_DISCOUNT ** (ahead / num_layers), self.shape.num_experts)
            self._discounts[layer] = discounts.astype(np.float32)
        return self._discounts[layer]


@cache
def compiled_reuse(folder: Path = Path(__file__).parent) -> ctypes.PyDLL | None:
    """The library of reuse.c. None where it was not compiled when expertly was installed, or is of another version.

    Calls keep the interpreter lock: they take microseconds, and to get it back from a thread that computes may take
    milliseconds.
    """
    for path in sorted(folder.glob("_reuse*.so")):
        with suppress(OSError, AttributeError):
            library = ctypes.PyDLL(str(path))
            if library.expertly_reuse_version() != _VERSION:
                continue
            begin, observe = library.expertly_reuse_begin, library.expertly_reuse_observe
            restored = library.expertly_reuse_restored
            begin.argtypes, begin.restype = (ctypes.c_void_p, ctypes.c_char_p), ctypes.c_size_t
            observe.argtypes = (ctypes.c_void_p, *2 * (ctypes.c_int,), ctypes.c_char_p, ctypes.c_int64, ctypes.c_int)
            restored.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
            observe.restype = restored.restype = None
            return library
    return None


class CompiledReuse:
    """What `NumpyReuse` does, by reuse.c."""

    def __init__(self, library: ctypes.PyDLL, num_experts: Sequence[int], mean: Floats, values: Floats) -> None:
        places = _places(num_experts)
        self.weights: list[Floats] = []
        rows = []  # of all layers, [S, E]: sums over S are sums of rows, each filled up to whole vectors
        for own, seen in places:
            weights = _first_weights(own, seen)
            rows.append(np.zeros((weights.shape[1], -(-len(weights) // 8) * 8), np.float32))
            self.weights.append(rows[-1][:, : len(weights)].T)
            self.weights[-1][:] = weights
        past = OwnPast(len(places))
        sizes = BATCH, HORIZON, len(places), STEPS, len(_AGE_CLASSES), len(_AGES) + 1, _NUM_RATES
        layers = np.array(
            [
                (own.start, own.stop - own.start, seen.start, seen.stop - seen.start, weights.ctypes.data)
                for (own, seen), weights in zip(places, rows, strict=True)
            ],
            np.int64,
        )
        arrays = layers, mean, values, _AGE_CLASSES, _RATES, past.first, _FIRST_WEIGHTS, _USES, _NEAR_USES
        numbers = (
            *(FADING, RATE, _LEAST_NORM, MEAN_RATE, _SUM_OF_DISCOUNTS, SHARPNESS, CARRIED, _RIDGE, _FIRST_SEEN),
            *(_FADING_OF_RATES, past.fading, past.fading_of_said),
        )
        parameters = struct.pack("7q9P12d", *sizes, *(array.ctypes.data for array in arrays), *numbers)
        nbytes = library.expertly_reuse_begin(None, parameters)
        assert nbytes, "reuse.c is of other sizes"
        memory = np.zeros(nbytes + 64, np.uint8)
        self._state = ctypes.c_void_p(-(-memory.ctypes.data // 64) * 64)
        library.expertly_reuse_begin(self._state, parameters)
        self._pointed_to = (memory, *arrays, *rows)
        self._observe, self._restored = library.expertly_reuse_observe, library.expertly_reuse_restored

    def observe(self, router: RouterRan, *, is_decode: bool) -> None:
        num = len(router.experts)
        numbers = struct.pack(f"{2 * num}i", *router.experts, *router.num_tokens)
        self._observe(self._state, router.layer, num, numbers, router.batch_tokens, is_decode)

    def restored(self, num_followed: Sequence[int]) -> None:
        self._restored(self._state, np.array(num_followed, np.int64).ctypes.data)


class NumpyReuse:
    """What the values of all experts follow from. It writes them to `values`, and the averages of their inputs to
    `mean`, by dense id.
    """

    def __init__(self, num_experts: Sequence[int], mean: Floats, values: Floats) -> None:
        recent: Floats = np.zeros(len(mean), np.float32)  # by dense id
        places = _places(num_experts)
        past = OwnPast(len(places))
        self._similar = SimilarSteps(num_experts)
        self._layers = [LayerReuse(own, seen, recent, mean, past) for own, seen in places]
        self._own = [(recent[own], values[own]) for own, _ in places]
        self.weights = [layer.weights for layer in self._layers]
        """Of each layer, [E, S]. Who writes them calls `restored` then."""

    def observe(self, router: RouterRan, *, is_decode: bool) -> None:
        """A layer is about to run at least one token."""
        layer, batch_tokens = router.layer, router.batch_tokens
        left = float(FADING**batch_tokens)
        recent, values = self._own[layer]
        recent *= left
        recent[list(router.experts)] += np.array(router.num_tokens) * ((1 - left) / batch_tokens)
        pairs = zip(router.experts, router.num_tokens, strict=True)
        experts = [expert for expert, num in pairs if num]  # others were chosen by pads alone
        similar = self._similar.followed_by(layer, experts) if is_decode else self._similar.end(layer)
        values[:] = self._layers[layer].step(experts, similar, batch_tokens, is_decode=is_decode)

    def restored(self, num_followed: Sequence[int]) -> None:
        """Weights and means come from another process; the means of each layer count for so many tokens."""
        for layer, num in zip(self._layers, num_followed, strict=True):
            layer.restored(num)


class LayerReuse:
    """The weights of the E experts of one layer, and the steps that they have yet to learn from. `own` and `seen` are
    the dense ids of these experts and of the S experts whose inputs the layer uses. `recent` and `mean` are the inputs
    of all experts and their averages; `NumpyReuse` updates the former, layers the latter. `past` is all layers'.
    """

    def __init__(self, own: slice, seen: slice, recent: Floats, mean: Floats, past: OwnPast) -> None:
        num = own.stop - own.start
        self._own_seen = slice(own.start - seen.start, own.stop - seen.start)
        self.weights = _first_weights(own, seen)
        self._base: Floats = np.zeros(num, np.float32)  # the value where inputs are at their averages
        # To learn from: inputs [S], values, what similar steps say, uses and classes of own past, [E].
        self._steps: list[tuple[Floats, Floats, Floats, Floats, npt.NDArray[np.int64]]] = []
        self._num_followed = 0  # tokens that the means of its inputs rest on
        self._age = np.full(num, len(_AGE_CLASSES), np.int64)  # steps since each expert's last use
        self._served: Floats = np.zeros(num, np.float32)  # steps, or prompt tokens, that each expert served; fading
        self._num_served = 1.0  # those of the layer; fading
        self._rate_class = np.zeros(num, np.int64)  # class of the ratio of the two (OwnPast)
        self._past = past
        self._recent, self._own_recent = recent[seen], recent[own]
        self._mean, self._own_mean = mean[seen], mean[own]

    def step(self, used: Sequence[int], similar: Floats, num_tokens: int, *, is_decode: bool) -> Floats:
        """The layer is about to use these experts, by number in the layer. `similar`: what similar steps needed after
        it, [E]. Returns the value of each expert, [E]. Updates the mean of the layer's inputs.
        """
        if len(self._steps) == BATCH + HORIZON:
            self._learn()
        if not is_decode:  # a prompt's experts say nothing of the steps after it
            self._steps.clear()
            self._follow(self._own_recent, num_tokens)
        values = self._products(self._recent) + self._base
        uses: Floats = np.zeros(len(values), np.float32)
        uses[used] = 1
        self._age += 1
        self._age[used] = 0
        if is_decode:
            self._served += uses
            self._num_served += 1
        else:  # as if each expert's tokens were spread evenly over the prompt
            self._age[used] = np.rint(1 / np.maximum(self._own_recent[used], 1 / num_tokens))
            self._served += self._own_recent * np.float32(num_tokens)
            self._num_served += num_tokens
            self._rate()
        classes = _AGE_CLASSES.take(self._age, mode="clip") + self._rate_class
        self._steps.append((self._recent.copy(), values, similar, uses, classes))
        self._num_followed += num_tokens
        of_model, of_similar, of_past = self._past.weights
        worth: Floats = of_model * values + of_similar * similar + of_past * self._past.said[classes]
        return worth

    def restored(self, num_followed: int) -> None:
        self._num_followed = num_followed
        self._steps.clear()
        self._rebase()

    def _learn(self) -> None:
        """Learn from the oldest steps and drop them."""
        inputs, values, similar, used, classes = map(np.stack, zip(*self._steps, strict=True))
        inputs, values = inputs[:BATCH], values[:BATCH]
        self._past.learn(classes[:BATCH], values, similar[:BATCH], _targets(NEAR_DISCOUNT) @ used)
        centred = inputs - self._mean
        errors = _targets(DISCOUNT) @ used - values
        errors *= (RATE / (_LEAST_NORM + np.einsum("bs,bs->b", centred, centred)))[:, None]
        self.weights += np.einsum("be,bs->es", errors, centred)
        self._follow(inputs[:, self._own_seen].mean(axis=0), BATCH)
        self._served *= _FADING_OF_RATES
        self._num_served *= _FADING_OF_RATES
        self._rate()
        del self._steps[:BATCH]

    def _rate(self) -> None:
        rates = self._served / np.float32(self._num_served)
        self._rate_class[:] = np.searchsorted(_RATES, rates, side="right") * (len(_AGES) + 1)

    def _follow(self, recent: Floats, num_tokens: int) -> None:
        rate = max(1 - (1 - MEAN_RATE) ** num_tokens, num_tokens / max(num_tokens, self._num_followed))
        self._own_mean += (recent - self._own_mean) * np.float32(rate)
        self._rebase()

    def _rebase(self) -> None:
        np.subtract(self._own_mean * np.float32(_SUM_OF_DISCOUNTS), self._products(self._mean), out=self._base)

    def _products(self, inputs: Floats) -> Floats:
        """[E]. Not by BLAS, which might round differently with another number of threads."""
        products: Floats = np.einsum("es,s->e", self.weights, inputs)
        return products


class SimilarSteps:
    """What the last STEPS steps of decode chose, and how alike each is to the running step: by the share of its experts
    that both chose, in its layers so far, and less in those of the step before. They are not part of a file.
    """

    def __init__(self, num_experts: Sequence[int]) -> None:
        self._num_layers = self._layer = len(num_experts)
        self._used: list[Floats] = [np.zeros((num, STEPS), np.float32) for num in num_experts]
        self._nothing: list[Floats] = [np.zeros(num, np.float32) for num in num_experts]
        self._alike: Floats = np.zeros(STEPS, np.float32)
        self._counts: Floats = np.zeros(STEPS, np.float32)  # 1 where HORIZON steps followed before a prompt
        self._at = 0  # the running step's place; the one after it is the oldest's
        self._num = 0  # steps since the last prompt

    def followed_by(self, layer: int, experts: Sequence[int]) -> Floats:
        """What a layer that is about to use these experts, by number in the layer, needed after similar steps, [E]."""
        if layer <= self._layer:
            self._begin()
        self._layer = layer
        used, alike = self._used[layer], self._alike
        alike += np.add.reduce(used[experts]) * np.float32(SHARPNESS / (self._num_layers * max(1, len(experts))))
        used[:, self._at] = 0
        used[experts, self._at] = 1
        likeness = np.exp(alike - np.maximum.reduce(alike))
        likeness *= self._counts
        total = np.add.reduce(likeness)
        if not total:
            return self._nothing[layer]
        likeness /= total
        shares = np.convolve(np.concatenate((likeness[-HORIZON:], likeness[:-1])), _NEAR_USES, "valid")
        needed: Floats = np.einsum("es,s->e", used, shares)
        return needed

    def end(self, layer: int) -> Floats:
        """A prompt runs: what follows it does not follow the last steps. Returns zeros, [E]."""
        self._num = 0
        self._layer = self._num_layers
        self._alike.fill(0)
        return self._nothing[layer]

    def _begin(self) -> None:
        self._at = (self._at + 1) % STEPS
        self._counts[self._at] = 0
        self._num += 1
        if self._num > HORIZON:
            self._counts[self._at - HORIZON] = 1
        self._alike = np.roll(self._alike, 1) * np.float32(CARRIED)


class OwnPast:
    """What experts of all layers turned out to be worth, by how long ago and how often they had been used, weighed
    against the other predictions by a regression on what was then needed, over the last WEIGHED tokens.

    A class is a pair of an age in _AGE_CLASSES and a rate of use (two classes an octave). Before anything was seen,
    recent and frequent use are worth most.
    """

    def __init__(self, num_layers: int) -> None:
        ages = np.array([*_AGES, 2 * _AGES[-1]])
        rates = 2.0 ** (np.arange(_NUM_RATES) / 2 + _LEAST_OCTAVE)
        self.first = (0.75 / (1 + ages) + 1.5 * rates[:, None]).clip(0, 1).reshape(-1)
        self._sums, self._nums = np.zeros(len(self.first)), np.zeros(len(self.first))
        self.said: Floats = self.first.astype(np.float32)  # the worth of each class
        self.weights: Floats = _FIRST_WEIGHTS.astype(np.float32)  # of the model, similar steps and own past
        self._products = np.zeros((4, 4))  # of these three and what was needed
        self.fading = np.exp(-BATCH / (WEIGHED * num_layers))
        self.fading_of_said = np.exp(-BATCH / (KNOWN * num_layers))

    def learn(self, classes: npt.NDArray[np.int64], values: Floats, similar: Floats, needed: Floats) -> None:
        """Learn from B steps of a layer, [B, E] each: classes, what was said of them, and what they were worth."""
        terms = np.stack((values, similar, self.said[classes], needed)).reshape(4, -1).astype(np.float64)
        self._products *= self.fading
        self._products += np.einsum("im,jm->ij", terms, terms)
        squares = self._products[:3, :3] + _RIDGE * np.eye(3)
        self.weights[:] = np.linalg.solve(squares, self._products[:3, 3] + _RIDGE * _FIRST_WEIGHTS)
        flat, num = classes.reshape(-1), len(self._nums)
        for array in (self._sums, self._nums):
            array *= self.fading_of_said
        self._sums += np.bincount(flat, needed.reshape(-1), num)
        self._nums += np.bincount(flat, minlength=num)
        self.said[:] = (self._sums + _FIRST_SEEN * self.first) / (self._nums + _FIRST_SEEN)


def _places(num_experts: Sequence[int]) -> list[tuple[slice, slice]]:
    """For each layer the dense ids of its experts and of those whose inputs it uses: of as many layers as MOST_WEIGHTS
    allows.
    """
    ends, places = [0, *accumulate(num_experts)], []
    for layer, num in enumerate(num_experts):
        seen = own = slice(ends[layer], ends[layer + 1])
        for reach in range(1, REACH + 1):
            wider = slice(ends[max(0, layer - reach)], ends[min(len(num_experts), layer + reach + 1)])
            if (wider.stop - wider.start) * num <= MOST_WEIGHTS:
                seen = wider
        places.append((own, seen))
    return places


def _first_weights(own: slice, seen: slice) -> Floats:
    """[E, S]: the value is an expert's own recent use."""
    return np.eye(own.stop - own.start, seen.stop - seen.start, own.start - seen.start, np.float32)


@cache
def _targets(discount: float) -> Floats:
    """[BATCH, BATCH + HORIZON]: uses -> the discounted uses after each of the first BATCH steps."""
    ahead = np.arange(BATCH + HORIZON) - np.arange(BATCH)[:, None]
    weights = np.where((ahead >= 1) & (ahead <= HORIZON), discount ** (ahead - 1.0), 0.0)
    return (weights / (1 - discount**HORIZON)).astype(np.float32)


_USES, _NEAR_USES = (_targets(discount)[0, 1 : 1 + HORIZON].copy() for discount in (DISCOUNT, NEAR_DISCOUNT))
"""The worth of a use after 1, 2, ... steps."""


class ReuseTraining(Training):
    """Teaches a model what the training part uses again soon."""

    max_rows = 8192  # more teach little, and take seconds

    def __init__(self, model: ReuseModel) -> None:
        self._model = model

    def router_ran(self, router: RouterRan) -> None:
        self._model.observe(router)

    def found(self, origin: str) -> ReuseModel:
        return self._model


class Reuse(DenseScoredPolicy):
    """The score is the model's value, as seen from the layer that ran last. A cache that holds all experts of the model
    learns nothing, since it never evicts.
    """

    name = "reuse"
    needs_best = True
    learns = ReuseModel

    def __init__(self, geometry: Geometry, model: ReuseModel, capacity: int) -> None:
        super().__init__(geometry.num_experts)
        self.model = model
        """The model that all caches share."""
        self._has_choice = capacity < geometry.num_experts

    @classmethod
    def of_model(cls, geometry: Geometry, known: Known = NOTHING, given: Mapping[str, str] = NO_OPTIONS) -> MakePolicy:
        """The caches share one model, which starts from a known one of the same layers, or with nothing learned."""
        cls.parse(given)
        shared = ReuseModel(geometry)
        taught = known.get(ReuseModel)
        if taught is not None and taught.shape.num_experts == shared.shape.num_experts:
            shared.restore(taught.state())
        return lambda capacity, layers: cls(geometry, shared, capacity)

    @classmethod
    def training(cls, geometry: Geometry) -> ReuseTraining:
        return ReuseTraining(ReuseModel(geometry))

    @property
    def learned(self) -> ReuseModel:
        return self.model

    def needed(self, experts: Sequence[int], router: RouterRan) -> None:
        if self._has_choice:
            self.model.observe(router)

    def all_scores(self) -> Floats:
        return self.model.worth()
