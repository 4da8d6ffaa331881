"""A trace whose routing can be learned: each layer's router input follows from the one before, its experts from it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from expertly_lab.trace.reader import Trace
from expertly_lab.trace.schema import NO_EXPERT, TraceLayer, trace_field
from expertly_lab.trace.writer import TraceWriter

HIDDEN_SIZE = 12
LAYERS = (TraceLayer(8, 2), TraceLayer(8, 2), TraceLayer(6, 2), TraceLayer(8, 3))


def planted_trace(
    folder: Path,
    num_requests: int = 24,
    num_rows: int = 60,
    *,
    layers: tuple[TraceLayer, ...] = LAYERS,
    fields: tuple[str, ...] = ("probs", "router_inputs", "lookahead"),
    ran: Callable[[int, int], bool] = lambda row, layer: True,
    num_prompt: int = 10,
    seed: int = 0,
) -> Trace:
    """`lookahead` is what the routers would say of the input as it is; token ids tell nothing. Where `ran` says that a
    layer did not, the row has no experts there.
    """
    dice = np.random.default_rng(seed)
    num_layers, width = len(layers), max(layer.num_experts for layer in layers)
    turns = dice.standard_normal((num_layers, HIDDEN_SIZE, HIDDEN_SIZE)) / HIDDEN_SIZE**0.5
    routers = dice.standard_normal((num_layers, width, HIDDEN_SIZE))
    infos = [trace_field(name, layers, hidden_size=HIDDEN_SIZE, max_distance=2) for name in fields]
    with TraceWriter(folder, model="planted", layers=layers, fields=infos) as writer:
        for request in range(num_requests):
            writer.begin_request(None, None, num_prompt)
            for first, count in ((0, num_prompt), *((row, 1) for row in range(num_prompt, num_rows))):
                x = dice.standard_normal((count, HIDDEN_SIZE))
                inputs = np.zeros((count, num_layers, HIDDEN_SIZE))
                probs = np.zeros((count, num_layers, width))
                lookahead = np.zeros((count, num_layers, 2, width))
                experts = np.full((count, num_layers, max(layer.top_k for layer in layers)), NO_EXPERT, np.uint16)
                for index, layer in enumerate(layers):
                    inputs[:, index] = 3 + 2 * x  # neither centred nor of unit spread
                    probs[:, index, : layer.num_experts] = softmax(x @ routers[index].T[:, : layer.num_experts])
                    top = np.argsort(-probs[:, index], axis=1)[:, : layer.top_k]
                    for row in range(count):
                        if ran(first + row, index):
                            experts[row, index, : layer.top_k] = top[row]
                    for distance in (1, 2):
                        if index + distance < num_layers:
                            num = layers[index + distance].num_experts
                            lookahead[:, index, distance - 1, :num] = softmax(x @ routers[index + distance].T[:, :num])
                    x = np.maximum(x @ turns[index], -0.5) * 1.3
                values = {"probs": probs, "router_inputs": inputs, "lookahead": lookahead}
                writer.append(
                    {
                        "request": np.full(count, request, np.int32),
                        "is_prefill": np.full(count, first == 0 and num_prompt > 0),
                        "token": dice.integers(0, 5, count).astype(np.int32),
                        "experts": experts,
                        "weights": np.where(experts == NO_EXPERT, 0, 0.25).astype(np.float16),
                        **{name: values[name].astype(np.float16) for name in fields},
                    }
                )
    return Trace.open(folder)


def softmax(logits: np.ndarray) -> np.ndarray:
    scores = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return scores / scores.sum(axis=-1, keepdims=True)
