"""How often each expert was chosen in the training part of a trace."""

from __future__ import annotations

import numpy as np

from expertly.core.geometry import Geometry
from expertly.sim.schedule import Schedule
from expertly.trace.reader import Trace
from expertly.trace.schema import NO_EXPERT, max_experts


def popularity(trace: Trace, schedule: Schedule, geometry: Geometry) -> dict[int, int]:
    """Tokens that each expert served in the training part; empty without one."""
    no_expert = max_experts(trace.manifest.layers)
    counts = np.zeros((geometry.num_layers, no_expert + 1), dtype=np.int64)
    offsets = (np.arange(geometry.num_layers) * (no_expert + 1))[:, None]
    for span in schedule.training:
        for block in trace.blocks(("experts",), span.first_row, span.first_row + span.num_rows):
            ids = block.columns["experts"].astype(np.int64)
            ids[ids == NO_EXPERT] = no_expert
            counts += np.bincount((ids + offsets).reshape(-1), minlength=counts.size).reshape(counts.shape)
    return {
        geometry.expert_id(layer, expert): int(counts[layer, expert])
        for layer in range(geometry.num_layers)
        for expert in range(geometry.layers[layer].num_experts)
        if counts[layer, expert]
    }
