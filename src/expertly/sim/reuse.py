"""How the experts of the training part recur, for who chooses what of the memory holds copies."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from expertly.policies.allocation.adapmoe import StackDistances
from expertly.scheduler.compressed_share import Reuse, reuse_of
from expertly.sim.usage import decoding
from expertly.sim.workload import RowRange, Workload
from expertly.trace.reader import Trace

MAX_ITERATIONS = 4000
"""That are looked at: it takes a second for each few thousand, and changes little after the first."""


def reuse_of_training(trace: Trace, spans: Sequence[RowRange]) -> Reuse | None:
    """Of what these requests decode first, over all layers; None where they decode nothing."""
    if not spans:
        return None
    workload = Workload(trace, spans)
    seen = [StackDistances(layer.num_experts) for layer in trace.manifest.layers]
    for iteration in islice(workload.iterations(), MAX_ITERATIONS):
        for router in iteration.layers:
            seen[router.layer].add(decoding(router))
    return reuse_of([one.misses() for one in seen])
