"""A split plan: how many experts each layer keeps, and how much of each; and the file of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from expertly.core.errors import ConfigError
from expertly.core.files import disk_errors, json_bytes, write_atomic
from expertly.core.geometry import SIZE_FIELDS, Geometry, LayerGeometry
from expertly.core.untrusted import read_json_object
from expertly.policies.allocation.uniform import whole_tops

_FORMAT = "expertly-split-plan"
_VERSION = 1
_ABOUT = "about"
"""What a file says of itself beside the plan, for people."""

_PLAN_FIELDS = ("format", "version", "segments_per_expert", "layers")
_GEOMETRY_FIELDS = tuple(field.name for field in fields(LayerGeometry))
_MAX_COUNT = 1 << 31


@dataclass(frozen=True, slots=True)
class LayerSplit:
    """The `kept_experts` of highest cache priority keep their first `kept_segments` segments each."""

    kept_experts: int  # C
    kept_segments: int  # theta * P of each; 0 where C is
    budget_segments: int  # V: at least C * theta * P; what that leaves of it stays free

    @property
    def used_segments(self) -> int:
        return self.kept_experts * self.kept_segments


_SPLIT_FIELDS = tuple(field.name for field in fields(LayerSplit))


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """What every layer keeps. Raises ConfigError naming the field, its value and what is accepted."""

    geometry: Geometry
    layers: tuple[LayerSplit, ...]

    def __post_init__(self) -> None:
        if len(self.layers) != self.geometry.num_layers:
            accepted = f"one for each of {self.geometry.num_layers} MoE layers"
            raise _error("layers", f"{len(self.layers)} of them", accepted)
        num_segments = self.geometry.segments_per_expert
        for number, (layer, shape) in enumerate(zip(self.layers, self.geometry.layers, strict=True)):
            at = f"layers[{number}]"
            _whole(f"{at}.kept_experts", layer.kept_experts, 0, shape.num_experts)
            least, most = (1, num_segments) if layer.kept_experts else (0, 0)
            _whole(f"{at}.kept_segments", layer.kept_segments, least, most)
            most = shape.num_experts * num_segments
            _whole(f"{at}.budget_segments", layer.budget_segments, layer.used_segments, most)

    @property
    def free_segments(self) -> tuple[int, ...]:
        """Segments of each size class that the layers' budgets leave: they become staging slots."""
        free = [layer.budget_segments - layer.used_segments for layer in self.layers]
        return tuple(self.geometry.class_sums(free))

    def kept(self, geometry: Geometry) -> tuple[list[int], list[int]]:
        """What each layer keeps: its quota, in segments, and how many segments of an expert. A layer whose budget holds
        more tops than the plan's experts keeps them, too. Raises ConfigError where the plan is not for this model.
        """
        self.check_fits(geometry)
        tops = [layer.kept_segments or geometry.segments_per_expert for layer in self.layers]
        layers = zip(self.layers, tops, geometry.layers, strict=True)
        return [whole_tops(layer.budget_segments, top, shape.num_experts) for layer, top, shape in layers], tops

    def check_fits(self, geometry: Geometry, kept_slots: Sequence[int] | None = None) -> None:
        """Raises ConfigError where the plan is for other experts or segments than these, or where its budgets take more
        than `kept_slots` of a size class.
        """
        mine = self.geometry
        if geometry.segments_per_expert != mine.segments_per_expert:
            raise _error("segments_per_expert", mine.segments_per_expert, f"{geometry.segments_per_expert}, as it runs")
        if geometry.num_layers != mine.num_layers:
            raise _error("layers", f"{mine.num_layers} of them", f"the {geometry.num_layers} MoE layers of the model")
        for number, (planned, running) in enumerate(zip(mine.layers, geometry.layers, strict=True)):
            for name in _GEOMETRY_FIELDS:
                if getattr(planned, name) != getattr(running, name):
                    accepted = f"{getattr(running, name)}, as the model has it"
                    raise _error(f"layers[{number}].{name}", getattr(planned, name), accepted)
        if kept_slots is not None:
            budgets = mine.class_sums([layer.budget_segments for layer in self.layers])
            for planned_slots, slots in zip(budgets, kept_slots, strict=True):
                if planned_slots > slots:
                    raise ConfigError(
                        f"plan field layers: budgets of {planned_slots} segments together; must be at most the {slots} "
                        f"that the memory keeps beside the staging slots"
                    )

    def to_dict(self) -> dict[str, Any]:
        layers = [
            shape.as_dict() | asdict(layer) for shape, layer in zip(self.geometry.layers, self.layers, strict=True)
        ]
        return {
            "format": _FORMAT,
            "version": _VERSION,
            "segments_per_expert": self.geometry.segments_per_expert,
            "layers": layers,
        }

    @classmethod
    def from_dict(cls, read: object) -> SplitPlan:
        """The inverse of `to_dict`, of any parsed JSON."""
        plan = _object("file", read, _PLAN_FIELDS)
        if plan["format"] != _FORMAT:
            raise _error("format", plan["format"], repr(_FORMAT))
        _whole("version", plan["version"], _VERSION, _VERSION)
        segments = _whole("segments_per_expert", plan["segments_per_expert"], 1, _MAX_COUNT)
        if not isinstance(plan["layers"], list) or not plan["layers"]:
            raise _error("layers", plan["layers"], "a list of one object for each MoE layer")
        shapes, splits = [], []
        for number, one in enumerate(plan["layers"]):
            at = f"layers[{number}]"
            sizes = SIZE_FIELDS if not isinstance(one, dict) or "format" not in one else _GEOMETRY_FIELDS
            layer = _object(at, one, (*sizes, *_SPLIT_FIELDS))
            for name in (*SIZE_FIELDS, *_SPLIT_FIELDS):
                _whole(f"{at}.{name}", layer[name], 0, _MAX_COUNT)
            try:
                shapes.append(LayerGeometry.from_dict({name: layer[name] for name in sizes}))
            except ConfigError as error:
                raise ConfigError(f"plan field {at}: {error}") from None
            splits.append(LayerSplit(*(layer[name] for name in _SPLIT_FIELDS)))
        try:
            geometry = Geometry(tuple(shapes), segments)
        except ConfigError as error:
            raise ConfigError(f"plan: {error}") from None
        return cls(geometry, tuple(splits))


def save_plan(path: Path, plan: SplitPlan, about: Mapping[str, str | int | float | None]) -> None:
    """Replace the file at `path`; after a crash it is what it was before. Raises ConfigError where it cannot be."""
    with disk_errors(path, "writing the plan", ConfigError, ""):
        write_atomic(path, json_bytes({**plan.to_dict(), _ABOUT: dict(about)}))


def read_plan(path: str | Path) -> SplitPlan:
    """Raises ConfigError naming the file, the field, its value and what is accepted."""
    path = Path(path).expanduser()
    raw = read_json_object(path, ConfigError)
    raw.pop(_ABOUT, None)
    try:
        return SplitPlan.from_dict(raw)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _object(name: str, value: object, names: Sequence[str]) -> Mapping[str, Any]:
    """A JSON object of exactly these keys."""
    if not isinstance(value, dict):
        raise _error(name, value, f"an object of {', '.join(names)}")
    for key in value:
        if key not in names:
            raise _error(name, f"{key!r:.80}", f"no key but {', '.join(names)}")
    for key in names:
        if key not in value:
            raise _error(name, f"no {key!r}", f"all of {', '.join(names)}")
    return value


def _whole(name: str, value: object, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise _error(name, value, f"a whole number from {least} to {most}" if least < most else f"{least}")
    return value


def _error(name: str, value: object, accepted: str) -> ConfigError:
    text = value if isinstance(value, str) else repr(value)
    return ConfigError(f"plan field {name}={text:.80}: must be {accepted}")
