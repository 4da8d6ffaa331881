"""A lookahead that no router said: scores of a stated accuracy, made from the choices that they foretell."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from expertly.core.errors import TraceError
from expertly.trace.schema import MODELLED, FieldInfo, TraceLayer, trace_field

_BLOCK_SCORES = 1 << 22


def modelled_field(layers: Sequence[TraceLayer], accuracy: float) -> FieldInfo:
    """The field `lookahead`, one layer ahead, labelled as modelled.

    Raises TraceError where a layer has too few experts to be wrong about.
    """
    if not 0 <= accuracy <= 1:
        raise TraceError(f"lookahead={accuracy:g}: must be from 0 to 1, the share of named experts that are needed")
    for layer in layers:
        if accuracy < 1 and layer.num_experts < 2 * layer.top_k:
            raise TraceError(
                f"lookahead={accuracy:g}: of {layer.num_experts} experts, top-{layer.top_k}, too few are not needed to "
                "name wrong ones; accepted: 1"
            )
    note = f"{MODELLED}{accuracy:g} of the K best of the next layer are needed; nothing of the next token"
    return trace_field("lookahead", layers, max_distance=1, is_real=False, note=note)


def modelled_lookahead(
    rng: np.random.Generator, experts: npt.NDArray[np.uint16], num_experts: int, accuracy: float
) -> npt.NDArray[np.float16]:
    """Scores [T, L, 1, E] of the layer after each, from the chosen `experts` [T, L, K]; they sum to 1.

    Each needed expert is among the K best with probability `accuracy`; else one that is not needed takes its place, any
    of them alike, and it is anywhere among the rest. Of the next token nothing is known: the last layer's are 0.
    """
    num_rows, num_layers = experts.shape[:2]
    found = np.zeros((num_rows, num_layers, 1, num_experts), np.float16)
    step = max(1, _BLOCK_SCORES // (num_layers * num_experts))
    for begin in range(0, num_rows, step):
        coming = experts[begin : begin + step, 1:].astype(np.intp)  # [t, L - 1, K]
        found[begin : begin + step, :-1, 0] = _scores(rng, coming, num_experts, accuracy)
    return found


def _scores(
    rng: np.random.Generator, needed: npt.NDArray[np.intp], num_experts: int, accuracy: float
) -> npt.NDArray[np.float64]:
    """[..., E] for the `needed` [..., K]."""
    is_right = rng.random(needed.shape) < accuracy
    lot = rng.random((*needed.shape[:-1], num_experts))
    of_others = lot.copy()
    np.put_along_axis(of_others, needed, -1.0, axis=-1)
    place = np.argsort(np.argsort(-of_others, axis=-1), axis=-1)  # 0: the first of those that are not needed
    is_best = place < (~is_right).sum(axis=-1, keepdims=True)
    np.put_along_axis(is_best, needed, is_right, axis=-1)
    scores = rng.random(lot.shape) + np.where(is_best, 2.0, 0.01)  # a gap that float16 keeps; none is 0, "unknown"
    normalised: npt.NDArray[np.float64] = scores / scores.sum(axis=-1, keepdims=True)
    return normalised
