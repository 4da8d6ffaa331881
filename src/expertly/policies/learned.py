"""What policies learn, and the file that keeps it."""

from __future__ import annotations

from dataclasses import dataclass

from expertly.core.errors import ConfigError
from expertly.core.geometry import Geometry

MAX_EXPERTS = 0xFFFE


@dataclass(frozen=True, slots=True)
class ModelShape:
    """How many experts each MoE layer of a model has, and how many its router chooses."""

    num_experts: tuple[int, ...]
    top_k: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.num_experts or len(self.num_experts) != len(self.top_k):
            raise ConfigError(
                f"model shape: num_experts of {len(self.num_experts)} layers and top_k of {len(self.top_k)}; "
                "must be as many, and at least one"
            )
        for experts, top_k in zip(self.num_experts, self.top_k, strict=True):
            if not 1 <= top_k <= experts <= MAX_EXPERTS:
                raise ConfigError(
                    f"model shape: num_experts={experts}, top_k={top_k}: must be 1 <= top_k <= experts <= {MAX_EXPERTS}"
                )

    @classmethod
    def of(cls, geometry: Geometry) -> ModelShape:
        """That of a model."""
        layers = geometry.layers
        return cls(tuple(layer.num_experts for layer in layers), tuple(layer.top_k for layer in layers))

    @property
    def num_layers(self) -> int:
        return len(self.num_experts)

    @property
    def max_experts(self) -> int:
        """E, of the largest layer."""
        return max(self.num_experts)

    @property
    def max_top_k(self) -> int:
        return max(self.top_k)
