"""How long loads can hide behind computing, a layer of a decode step (MoEpic, section 3.4.1, equations 5-7)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from expertly.core.errors import ConfigError
from expertly.core.geometry import Geometry

Loaded = TypeVar("Loaded", float, npt.NDArray[np.float64])
"""m: expected experts' worth of what a layer needs that is on the device when its router speaks, 0 to K."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Measured times of one decode step; the tuples are over the L layers.

    The paper's terms with alpha needed experts there, beta with their top segments only and gamma absent are
    those with m = alpha + beta * theta: as alpha + beta + gamma = K, beta * (1 - theta) + gamma is K - m.
    Raises ConfigError naming the field, its value and what is accepted.
    """

    top_k: tuple[int, ...]
    attention_ns: tuple[int, ...]  # what a layer does before its experts
    moe_ns: tuple[int, ...]  # its K experts, everything being there
    load_ns: tuple[int, ...]  # one whole expert, from host to device
    head_ns: int  # what comes between the last layer and the next token's first

    def __post_init__(self) -> None:
        num_layers = len(self.top_k)
        if self.head_ns < 0:
            raise ConfigError(f"timing field head_ns={self.head_ns}: must be at least 0")
        for name, least in (("top_k", 1), ("attention_ns", 0), ("moe_ns", 0), ("load_ns", 0)):
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
    ) -> Timing:
        """For a model; a single time holds for all its layers."""
        top_k = tuple(layer.top_k for layer in geometry.layers)
        a, m, t = (_for_layers(times, len(top_k)) for times in (attention_ns, moe_ns, load_ns))
        return cls(top_k, a, m, t, head_ns)

    @property
    def num_layers(self) -> int:
        return len(self.top_k)

    def first_window_ns(self) -> float:
        """T_wind of the first layer: prefetching for it begins when the last layer of the token before is done."""
        return float(self.head_ns + self.attention_ns[0])

    def next_window_ns(self, layer: int, loaded: float) -> float:
        """T_wind of the layer after `layer`: from when that one has loaded all that it needs (equation 7)."""
        overlapped = min(self.hide_ns(layer, loaded), self.miss_ns(layer, loaded))
        return self.moe_ns[layer] - overlapped + self.attention_ns[layer + 1]

    def hide_ns(self, layer: int, loaded: Loaded) -> Loaded:
        """T_hide: computing what is there (equation 5)."""
        return loaded * (self.moe_ns[layer] / self.top_k[layer])

    def miss_ns(self, layer: int, loaded: Loaded) -> Loaded:
        """T_miss: loading what is not."""
        return (self.top_k[layer] - loaded) * float(self.load_ns[layer])

    def exposed_ns(self, layer: int, loaded: float) -> float:
        """T: what of the loading no computing hides (equation 6)."""
        return max(0.0, self.miss_ns(layer, loaded) - self.hide_ns(layer, loaded))

    def exposed_of_ns(self, layer: int, loaded: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """The same of many."""
        exposed: npt.NDArray[np.float64] = np.maximum(0.0, self.miss_ns(layer, loaded) - self.hide_ns(layer, loaded))
        return exposed


def _for_layers(times: int | Sequence[int], num_layers: int) -> tuple[int, ...]:
    return (times,) * num_layers if isinstance(times, int) else tuple(times)
