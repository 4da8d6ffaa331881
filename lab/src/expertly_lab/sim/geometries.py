"""Shapes of models as a simulation knows them: strict TOML files that ship or that users wrote."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Le

from expertly.core.geometry import DenseShape, LayerGeometry
from expertly_lab.sim.hardware import DESCRIPTION, read_toml


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """What a simulation needs to know of a model besides its routing, where the trace does not have it."""

    __pydantic_config__: ClassVar[Any] = DESCRIPTION

    name: str
    num_layers: Annotated[int, Ge(1), Le(10_000)]
    layer: LayerGeometry
    dense: DenseShape | None = None

    @property
    def layers(self) -> tuple[LayerGeometry, ...]:
        return (self.layer,) * self.num_layers


def read_geometry(name_or_file: str) -> ModelSizes:
    """A shipped geometry by its name, else a TOML file by its path. Raises ConfigError as `Hardware.read`."""
    return read_toml("geometry", "geometry", name_or_file, ModelSizes)
