"""A trace to run experiments on: with the sizes of its experts, and what stands in for what it lacks."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from expertly.core.errors import ExpertlyError
from expertly.core.geometry import DenseShape, LayerGeometry
from expertly.data import demo_predictor
from expertly.policies.learned import read_learned
from expertly.policies.predictor.learned import LearnedWeights
from expertly.scheduler.presets import get_system
from expertly.scheduler.system import names_of_options
from expertly.trace.reader import Trace

SMALL_NBYTES = 1 << 20
SCALED_NBYTES = 8 << 20
"""Experts smaller than the first are taken for experts of the second: they would be loaded in no time."""

_FIRST_ROWS = 4096


@dataclass(frozen=True, slots=True)
class Subject:
    """One trace. `sizes` says whose experts' sizes it is run with."""

    name: str
    trace: Trace
    layers: tuple[LayerGeometry, ...]
    dense: DenseShape | None
    sizes: str
    weights: LearnedWeights | None  # of a learned predictor
    weights_note: str | None  # what they learned from
    num_tokens: int | None = None  # to simulate, whatever is asked for; None: as many as are

    @classmethod
    def open(cls, path: Path, predictor: Path | None = None) -> Subject:
        """Raises TraceError or StoreError where a file is not what it must be, and ConfigError for a trace that does
        not know the sizes of its experts.
        """
        trace = Trace.open(path)
        known = [layer.geometry() for layer in trace.manifest.layers]
        layers = tuple(layer for layer in known if layer is not None)
        if len(layers) != len(known):
            raise ExpertlyError(
                f"trace={str(path)!r}: does not know its experts' sizes; `expertly lab trace import --geometry` gives "
                "them"
            )
        sizes = "its own sizes"
        if layers[0].expert_nbytes < SMALL_NBYTES:
            factor = math.ceil(SCALED_NBYTES / layers[0].expert_nbytes)
            layers = tuple(replace(one, intermediate_size=one.intermediate_size * factor) for one in layers)
            sizes = f"experts taken for {factor} times theirs, {layers[0].expert_nbytes / (1 << 20):.1f} MiB"
        weights, note = _weights(trace, predictor)
        return cls(path.resolve().name, trace, layers, trace.manifest.dense, sizes, weights, note)

    @property
    def is_full(self) -> bool:
        """Recorded whole, with prompts."""
        return self.has_prompts and all(self.trace.is_real(name) for name in ("probs", "embedding", "router_inputs"))

    @property
    def has_prompts(self) -> bool:
        """Whether it has prompts, so that there is a time to first token; imported routing has none."""
        return bool(self.trace.rows("is_prefill", 0, min(_FIRST_ROWS, self.trace.num_rows)).any())

    def lacks(self, needs: tuple[str, ...]) -> list[str]:
        """Of what an experiment needs, what the trace does not have."""
        there = {"prompts": self.has_prompts, "weights": self.weights is not None}
        return [name for name in needs if not (there[name] if name in there else self.trace.is_real(name))]

    def fitted(self, system: str) -> tuple[str, bool]:
        """The system as it can run on this trace, and whether its prediction is modelled instead of its own: right as
        often as ProMoE (section 4) found skip prediction to be, by the distance.
        """
        parts = get_system(system)
        lacking = (parts.prediction in ("lookahead", "speculative") and not self.trace.has("lookahead")) or (
            parts.prediction == "learned" and (self.weights is None or not self.trace.has("router_inputs"))
        )
        if not lacking:
            return system, False
        name, *settings = system.split(":")
        of_predictor = {"prediction", *names_of_options("prediction", parts.prediction)}
        own = [one for one in settings if one.partition("=")[0] not in of_predictor]
        distance = [] if any(one.startswith("distance=") for one in own) else [f"distance={parts.distance}"]
        return ":".join([name, "prediction=modelled", *own, *distance]), True


def _weights(trace: Trace, predictor: Path | None) -> tuple[LearnedWeights | None, str | None]:
    """Given ones, or those that ship, for a trace of the demo model."""
    if predictor is None:
        if trace.manifest.model != "demo" or not demo_predictor().is_file():
            return None, None
        predictor = demo_predictor()
    file = read_learned(predictor, LearnedWeights)
    is_own = file.header.about.get("trace") == trace.fingerprint
    source = "the training part of this trace" if is_own else "requests that are not of this trace"
    shapes = [(layer.num_experts, layer.top_k) for layer in trace.manifest.layers]
    if shapes != list(zip(file.learned.num_experts, file.learned.top_k, strict=True)):
        return None, None
    return file.learned, f"trained networks (`promoe`) learned from {source}"
