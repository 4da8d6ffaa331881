"""How long loads can hide behind computing, for each layer of a decode step (MoEpic, section 3.4.1, equations 5-7)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from expertly.core.errors import ConfigError
from expertly.core.geometry import Geometry

Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Parts:
    """What computing and loading experts in parts is expected to cost one layer, beyond the paper's model (ours)."""

    further: Doubles  # spans beyond one an expert
    early: Doubles  # of their fixed costs, so many are paid while what is missing loads, beyond those in m
    lacking: Doubles  # needed experts that are not all there when the router has run, 0 to K


@dataclass(frozen=True, slots=True)
class Timing:
    """Measured times of one decode step; tuples are over the L layers.

    `loaded` below is the paper's m: how many of the K needed experts, in parts of experts, are on the device when the
    router has run. With alpha experts there whole and beta as tops of theta, m = alpha + beta * theta; as alpha + beta
    + gamma = K, the paper's beta * (1 - theta) + gamma is K - m. Methods take arrays, an element a split.

    In the paper a part of an expert takes that part of its time: these are its equations where `span_ns` and `ask_ns`
    are 0, their default. Raises ConfigError naming the field, its value and what is accepted.
    """

    top_k: tuple[int, ...]
    attention_ns: tuple[int, ...]  # what a layer does before its experts
    moe_ns: tuple[int, ...]  # its K experts, everything being there
    load_ns: tuple[int, ...]  # one whole expert, from host to device
    head_ns: int  # what comes between the last layer and the next token's first
    span_ns: tuple[int, ...] = ()  # of every span but one, where an expert is computed in several
    ask_ns: tuple[int, ...] = ()  # the computing thread's own time to ask for what a layer lacks, once

    def __post_init__(self) -> None:
        num_layers = len(self.top_k)
        for name in ("span_ns", "ask_ns"):
            object.__setattr__(self, name, getattr(self, name) or (0,) * num_layers)
        if self.head_ns < 0:
            raise ConfigError(f"timing field head_ns={self.head_ns}: must be at least 0")
        for name in ("attention_ns", "moe_ns", "load_ns", "span_ns", "ask_ns"):
            times = getattr(self, name)
            if len(times) != num_layers:
                accepted = f"must be one for each of {num_layers} layers"
                raise ConfigError(f"timing field {name}: {len(times)} values; {accepted}")
            for layer, time_ns in enumerate(times):
                if time_ns < 0:
                    raise ConfigError(f"timing field {name}[{layer}]={time_ns}: must be at least 0")

    @classmethod
    def of(
        cls,
        geometry: Geometry,
        attention_ns: int | Sequence[int],
        moe_ns: int | Sequence[int],
        load_ns: int | Sequence[int],
        head_ns: int,
        span_ns: int | Sequence[int] = 0,
        ask_ns: int | Sequence[int] = 0,
    ) -> Timing:
        """The timing of a model; a single time holds for all its layers."""
        top_k = tuple(layer.top_k for layer in geometry.layers)
        attention, moe, load, span, ask = (
            (times,) * len(top_k) if isinstance(times, int) else tuple(times)
            for times in (attention_ns, moe_ns, load_ns, span_ns, ask_ns)
        )
        return cls(top_k, attention, moe, load, head_ns, span, ask)

    def counts_parts(self, layer: int) -> bool:
        return bool(self.span_ns[layer] or self.ask_ns[layer])

    @property
    def num_layers(self) -> int:
        return len(self.top_k)

    def first_window_ns(self) -> float:
        """T_wind of the first layer: prefetching for it begins when the last layer of the token before is done."""
        return float(self.head_ns + self.attention_ns[0])

    def next_window_ns(self, layer: int, loaded: Doubles, parts: Parts | None = None) -> Doubles:
        """T_wind of the layer after `layer`: it begins when `layer` has loaded all that it needs (equation 7)."""
        hide, spans = self._hide_ns(layer, loaded), np.zeros_like(loaded)
        if parts is not None:
            hide = hide + parts.early * self.span_ns[layer]
            spans = parts.further * self.span_ns[layer]
        after = self.attention_ns[layer + 1] if layer + 1 < self.num_layers else self.head_ns
        window: Doubles = float(self.moe_ns[layer]) + spans - np.minimum(hide, self._miss_ns(layer, loaded)) + after
        return window

    def exposed_ns(self, layer: int, loaded: Doubles, parts: Parts | None = None) -> Doubles:
        """T: the part of loading that no computing hides (equation 6).

        With `parts` (ours): all that the layer takes beyond its time with everything resident and whole, as the mean
        over tokens, not that of the mean token; each of the K needed experts lacks something equally often.
        """
        if parts is None:
            return np.maximum(0.0, self._miss_ns(layer, loaded) - self._hide_ns(layer, loaded))
        top_k, span_ns, each_ns = self.top_k[layer], self.span_ns[layer], self.moe_ns[layer] / self.top_k[layer]
        share = parts.lacking / top_k
        # What one that lacks something adds to the wait: its load, that it is not there to be computed, less its top's.
        all_ns = (top_k - loaded) * (self.load_ns[layer] + each_ns) - parts.early * span_ns
        one_ns = all_ns / np.where(parts.lacking > 0, parts.lacking, 1.0)
        exposed: Doubles = parts.further * span_ns + (1 - (1 - share) ** top_k) * self.ask_ns[layer]
        for num in range(1, top_k + 1):
            waits = np.maximum(0.0, num * one_ns - self.moe_ns[layer])
            exposed += math.comb(top_k, num) * share**num * (1 - share) ** (top_k - num) * waits
        return exposed

    def _hide_ns(self, layer: int, loaded: Doubles) -> Doubles:
        """T_hide: computing what has been loaded (equation 5)."""
        return loaded * (self.moe_ns[layer] / self.top_k[layer])

    def _miss_ns(self, layer: int, loaded: Doubles) -> Doubles:
        """T_miss: loading what has not."""
        return (self.top_k[layer] - loaded) * float(self.load_ns[layer])
