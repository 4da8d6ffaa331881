"""The shape of a model's experts, and the dense ids of experts over all layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import gcd
from typing import Annotated

from annotated_types import Ge

from expertly.core.errors import ConfigError, GeometryError

SECTOR_NBYTES = 512
"""Of most disks: the least alignment of a read past the page cache."""

PAGE_NBYTES = 4096
"""Alignment that direct I/O needs of addresses, offsets and lengths."""


MAX_LAYERS, MAX_EXPERTS = 4096, 0xFFFE


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    """One MoE layer's experts. An expert is stored neuron-major, `[I, M, H]`, M = `num_matrices`; in a `format` of
    quantised weights (`expertly.formats`), `[I / block_size, block_nbytes]`.
    """

    num_experts: int  # E
    top_k: int  # K
    hidden_size: int  # H
    intermediate_size: int  # I
    num_matrices: int  # 3: gate row, up row, down column a neuron; 2 where there is no gate
    itemsize: int  # bytes of one weight, as it is computed with
    format: str = ""  # "": weights are stored as they are computed with; "a+b": gate and up in a, down in b
    block_size: int = 1  # neurons that can only be read together
    block_nbytes: int = 0  # of these, in a format

    def __post_init__(self) -> None:
        for name in ("num_experts", "top_k", "hidden_size", "intermediate_size", "itemsize", "block_size"):
            if not 1 <= getattr(self, name) < 1 << 40:
                raise GeometryError(f"geometry field {name}={getattr(self, name)}: must be from 1 to 2^40")
        is_blocked = self.block_size > 1 or self.block_nbytes > 0
        if (self.block_nbytes < 1) if self.format else is_blocked:
            raise GeometryError(
                f"geometry fields format={self.format!r:.80}, block_size={self.block_size}, block_nbytes="
                f"{self.block_nbytes}: blocks have bytes where there is a format, and only there"
            )
        if self.intermediate_size % self.block_size:
            raise GeometryError(
                f"geometry field block_size={self.block_size}: must divide intermediate_size={self.intermediate_size}"
            )
        if self.num_matrices not in (2, 3):
            raise GeometryError(f"geometry field num_matrices={self.num_matrices}: must be 2 or 3")
        if self.top_k > self.num_experts:
            raise GeometryError(f"geometry field top_k={self.top_k}: more than the {self.num_experts} experts")

    @property
    def neuron_nbytes(self) -> int:
        """Bytes of one neuron's weights, as they are computed with."""
        return self.num_matrices * self.hidden_size * self.itemsize

    @property
    def num_blocks(self) -> int:
        """Blocks of an expert; it can be cut only between them."""
        return self.intermediate_size // self.block_size

    @property
    def expert_nbytes(self) -> int:
        return self.num_blocks * (self.block_nbytes if self.format else self.neuron_nbytes)

    @property
    def nbytes(self) -> int:
        return self.num_experts * self.expert_nbytes

    def unquantised(self) -> LayerGeometry:
        """The same experts, stored as they are computed with."""
        return replace(self, format="", block_size=1, block_nbytes=0)


@dataclass(frozen=True, slots=True)
class DenseShape:
    """Bytes of weights outside the experts that one pass reads."""

    layer_nbytes: Annotated[int, Ge(0)]  # of one MoE layer's block: attention, norms, router, always-on experts
    head_nbytes: Annotated[int, Ge(0)]  # once: embedding rows, last norm, head


@dataclass(frozen=True, slots=True)
class Geometry:
    """All MoE layers of a model, each expert cut into P = `segments_per_expert` segments of I/P neurons.

    Layers with the same segment size share a pool of slots: a *size class*, numbered from 0 in the order of the first
    layer that has it. Raises ConfigError where P does not divide an intermediate size.
    """

    layers: tuple[LayerGeometry, ...]
    segments_per_expert: int = 1
    first_ids: tuple[int, ...] = field(init=False, repr=False, compare=False)  # each layer's first expert, by dense id
    layer_of: tuple[int, ...] = field(init=False, repr=False, compare=False)  # of each expert, by dense id
    unit_nbytes: tuple[int, ...] = field(init=False, repr=False, compare=False)  # of each layer
    size_classes: tuple[int, ...] = field(init=False, repr=False, compare=False)  # of each layer

    def __post_init__(self) -> None:
        num_segments = self.segments_per_expert
        if not self.layers:
            raise ConfigError("geometry field layers: a model without MoE layers has no experts to keep")
        first_ids, layer_of, segment_nbytes, next_id = [], [], [], 0
        classes: dict[int, int] = {}
        size_classes = []
        for number, layer in enumerate(self.layers):
            if num_segments < 1 or layer.num_blocks % num_segments:
                divisors = [p for p in range(1, 65) if layer.num_blocks % p == 0]
                of_format = f", in blocks of {layer.block_size} ({layer.format})" if layer.format else ""
                raise ConfigError(
                    f"segments={num_segments}: must divide the experts' intermediate size "
                    f"{layer.intermediate_size}{of_format}; accepted up to 64: {', '.join(map(str, divisors))}"
                )
            first_ids.append(next_id)
            next_id += layer.num_experts
            layer_of += [number] * layer.num_experts
            nbytes = layer.expert_nbytes // num_segments
            segment_nbytes.append(nbytes)
            size_classes.append(classes.setdefault(nbytes, len(classes)))
        object.__setattr__(self, "first_ids", tuple(first_ids))
        object.__setattr__(self, "layer_of", tuple(layer_of))
        object.__setattr__(self, "unit_nbytes", tuple(segment_nbytes))
        object.__setattr__(self, "size_classes", tuple(size_classes))

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_size_classes(self) -> int:
        return max(self.size_classes) + 1

    @property
    def num_experts(self) -> int:
        """Experts over all layers."""
        return len(self.layer_of)

    @property
    def nbytes(self) -> int:
        """Bytes of all experts of all layers."""
        return sum(layer.nbytes for layer in self.layers)

    def blocks_per_segment(self, layer: int) -> int:
        return self.layers[layer].num_blocks // self.segments_per_expert

    def expert_id(self, layer: int, expert: int) -> int:
        """Dense id of an expert over all layers."""
        return self.first_ids[layer] + expert

    def layers_of_class(self, size_class: int) -> list[int]:
        return [layer for layer, its_class in enumerate(self.size_classes) if its_class == size_class]

    def class_sums(self, of_layers: Sequence[int]) -> list[int]:
        """The sum over the layers of each size class of a number that each layer has."""
        sums = [0] * self.num_size_classes
        for size_class, number in zip(self.size_classes, of_layers, strict=True):
            sums[size_class] += number
        return sums


@dataclass(frozen=True, slots=True)
class ModelShape:
    """How many experts each MoE layer of a model has, and how many its router chooses."""

    num_experts: tuple[int, ...]
    top_k: tuple[int, ...]

    def __post_init__(self) -> None:
        numbers = f"num_experts={list(self.num_experts)!s:.80}, top_k={list(self.top_k)!s:.80}"
        if not 1 <= len(self.num_experts) == len(self.top_k) <= MAX_LAYERS:
            raise ConfigError(f"model shape: {numbers}: must be as many, of 1 to {MAX_LAYERS} layers")
        if not all(1 <= k <= num <= MAX_EXPERTS for num, k in zip(self.num_experts, self.top_k, strict=True)):
            raise ConfigError(f"model shape: {numbers}: must be 1 <= top_k <= experts <= {MAX_EXPERTS}")

    def __str__(self) -> str:
        """`26 layers of 64 experts, top-6`."""
        return f"{len(self.num_experts)} layers of {range_text(self.num_experts)} experts, top-{range_text(self.top_k)}"

    @classmethod
    def of(cls, geometry: Geometry) -> ModelShape:
        layers = geometry.layers
        return cls(tuple(layer.num_experts for layer in layers), tuple(layer.top_k for layer in layers))

    @property
    def num_layers(self) -> int:
        return len(self.num_experts)

    @property
    def max_experts(self) -> int:
        """E, of the largest layer."""
        return max(self.num_experts)


def range_text(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"


def stored_as(layers: Sequence[LayerGeometry], dtype: str) -> str:
    """How experts that are computed in `dtype` are stored: in their weight formats, or else in that dtype."""
    return "+".join(sorted({name for layer in layers for name in (layer.format or dtype).split("+")}))


def fitting_segments(layers: Sequence[LayerGeometry], wanted: int) -> int:
    """`wanted`, where the experts of all layers can be cut into so many segments; otherwise the possible number up to 5
    that is nearest 3, the lower of two (ProMoE, section 5, cuts experts in 3; the rest is our choice).
    """
    width = gcd(*(layer.num_blocks for layer in layers))
    if not width % wanted:
        return wanted
    return min((num for num in range(1, 6) if not width % num), key=lambda num: (abs(num - 3), num))
