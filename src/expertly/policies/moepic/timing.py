"""How long loads can hide behind computing, a layer of a decode step (MoEpic, section 3.4.1, equations 5-7)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from expertly.core.errors import ConfigError
from expertly.core.geometry import Geometry

Doubles = npt.NDArray[np.float64]
Loaded = TypeVar("Loaded", float, Doubles)
"""m: expected experts' worth of what a layer needs that is on the device when its router speaks, 0 to K."""


@dataclass(frozen=True, slots=True)
class Parts(Generic[Loaded]):
    """What computing and asking for parts of experts adds, expected, of what one layer needs (ours)."""

    further: Loaded  # pieces beyond one an expert
    early: Loaded  # of their fixed costs, so many are paid while what is missing loads, beyond those in m
    lacking: Loaded  # needed experts that are not all there when the router has spoken, 0 to K


@dataclass(frozen=True, slots=True)
class Timing:
    """Measured times of one decode step; the tuples are over the L layers.

    The paper's terms with alpha needed experts there, beta with their top segments only and gamma absent are
    those with m = alpha + beta * theta: as alpha + beta + gamma = K, beta * (1 - theta) + gamma is K - m.

    The paper computes a part of an expert in that part of its time. `piece_ns` and `ask_ns` are ours: with 0, which
    they are unless said, these are its equations. Raises ConfigError naming the field, its value and what is accepted.
    """

    top_k: tuple[int, ...]
    attention_ns: tuple[int, ...]  # what a layer does before its experts
    moe_ns: tuple[int, ...]  # its K experts, everything being there
    load_ns: tuple[int, ...]  # one whole expert, from host to device
    head_ns: int  # what comes between the last layer and the next token's first
    piece_ns: tuple[int, ...] = ()  # of every piece but one, where an expert is computed in several; none: 0
    ask_ns: tuple[int, ...] = ()  # the computing thread's own time to ask for what a layer lacks, once; none: 0

    def __post_init__(self) -> None:
        num_layers = len(self.top_k)
        for name in ("piece_ns", "ask_ns"):
            object.__setattr__(self, name, getattr(self, name) or (0,) * num_layers)
        if self.head_ns < 0:
            raise ConfigError(f"timing field head_ns={self.head_ns}: must be at least 0")
        for name in ("top_k", "attention_ns", "moe_ns", "load_ns", "piece_ns", "ask_ns"):
            least = int(name == "top_k")
            values = getattr(self, name)
            if len(values) != num_layers or not values:
                found = f"{len(values)} values"
                raise ConfigError(f"timing field {name}: {found}; must be one for each of {num_layers} layers")
            for layer, value in enumerate(values):
                if value < least:
                    raise ConfigError(f"timing field {name}[{layer}]={value}: must be at least {least}")

    @classmethod
    def of(
        cls,
        geometry: Geometry,
        attention_ns: int | Sequence[int],
        moe_ns: int | Sequence[int],
        load_ns: int | Sequence[int],
        head_ns: int,
        piece_ns: int | Sequence[int] = 0,
        ask_ns: int | Sequence[int] = 0,
    ) -> Timing:
        """For a model; a single time holds for all its layers."""
        top_k = tuple(layer.top_k for layer in geometry.layers)
        of_layers = (attention_ns, moe_ns, load_ns, piece_ns, ask_ns)
        a, m, t, p, q = (_for_layers(times, len(top_k)) for times in of_layers)
        return cls(top_k, a, m, t, head_ns, p, q)

    def without_parts(self) -> Timing:
        """As the paper counts: parts cost nothing of their own."""
        return replace(self, piece_ns=(), ask_ns=())

    def counts_parts(self, layer: int) -> bool:
        """Whether parts cost something of their own."""
        return bool(self.piece_ns[layer] or self.ask_ns[layer])

    @property
    def num_layers(self) -> int:
        return len(self.top_k)

    def first_window_ns(self) -> float:
        """T_wind of the first layer: prefetching for it begins when the last layer of the token before is done."""
        return float(self.head_ns + self.attention_ns[0])

    def next_window_ns(self, layer: int, loaded: float, parts: Parts[float] | None = None) -> float:
        """T_wind of the layer after `layer`: from when that one has loaded all that it needs (equation 7)."""
        hide, computing = self.hide_ns(layer, loaded), float(self.moe_ns[layer])
        if parts is not None:
            hide += parts.early * self.piece_ns[layer]
            computing += parts.further * self.piece_ns[layer]
        return computing - min(hide, self.miss_ns(layer, loaded)) + self.attention_ns[layer + 1]

    def hide_ns(self, layer: int, loaded: Loaded) -> Loaded:
        """T_hide: computing what is there (equation 5)."""
        return loaded * (self.moe_ns[layer] / self.top_k[layer])

    def miss_ns(self, layer: int, loaded: Loaded) -> Loaded:
        """T_miss: loading what is not."""
        return (self.top_k[layer] - loaded) * float(self.load_ns[layer])

    def exposed_ns(self, layer: int, loaded: float, parts: Parts[float] | None = None) -> float:
        """T: what of the loading no computing hides (equation 6). With `parts` all that the layer takes beyond what it
        does with everything there and whole, see `exposed_of_ns`.
        """
        if parts is None:
            return max(0.0, self.miss_ns(layer, loaded) - self.hide_ns(layer, loaded))
        return float(
            self.exposed_of_ns(
                layer,
                np.array([loaded]),
                Parts(np.array([parts.further]), np.array([parts.early]), np.array([parts.lacking])),
            )[0]
        )

    def exposed_of_ns(self, layer: int, loaded: Doubles, parts: Parts[Doubles] | None = None) -> Doubles:
        """The same of many. With `parts` (ours) pieces and asking are added, and it is the mean over tokens, not that
        of the mean token: each of the K needed experts lacks something as often as any other, whatever others do.
        """
        if parts is None:
            return np.maximum(0.0, self.miss_ns(layer, loaded) - self.hide_ns(layer, loaded))
        top_k, piece_ns, each_ns = self.top_k[layer], self.piece_ns[layer], self.moe_ns[layer] / self.top_k[layer]
        share = parts.lacking / top_k
        # What one that lacks something adds to the wait: its load, that it is not there to be computed, less its top's.
        all_ns = (top_k - loaded) * (self.load_ns[layer] + each_ns) - parts.early * piece_ns
        one_ns = all_ns / np.where(parts.lacking > 0, parts.lacking, 1.0)
        exposed = parts.further * piece_ns + (1 - (1 - share) ** top_k) * self.ask_ns[layer]
        for num in range(1, top_k + 1):
            waits = np.maximum(0.0, num * one_ns - self.moe_ns[layer])
            exposed += math.comb(top_k, num) * share**num * (1 - share) ** (top_k - num) * waits
        return exposed


def _for_layers(times: int | Sequence[int], num_layers: int) -> tuple[int, ...]:
    return (times,) * num_layers if isinstance(times, int) else tuple(times)
