"""The experiments by name, and what of them a command line asks for."""

from __future__ import annotations

from expertly.core.errors import ConfigError
from expertly.reproduce.experiment import PAPERS, Experiment
from expertly.reproduce.fmoe import ablation, batch, breakdown, distance, entropy, online, overall, similarity, store
from expertly.reproduce.moe_infinity import latency, query, recovery, skew
from expertly.reproduce.moepic import caching, sensitivity, speed, splitting
from expertly.reproduce.moepic import similarity as inputs
from expertly.reproduce.promoe import accuracy, baseline, scale
from expertly.reproduce.promoe import speed as promoe

EXPERIMENTS: dict[str, Experiment] = {
    one.name: one
    for one in (
        entropy.EXPERIMENT,
        distance.HITS,
        similarity.EXPERIMENT,
        overall.OVERALL,
        online.EXPERIMENT,
        overall.BUDGETED,
        ablation.TRACK,
        ablation.EVICT,
        distance.TIMES,
        store.CAPACITY,
        batch.EXPERIMENT,
        breakdown.EXPERIMENT,
        store.MEMORY,
        skew.SKEW,
        skew.GROUPS,
        latency.TPOT,
        latency.CONTEXT,
        latency.CAPACITY,
        recovery.EXPERIMENT,
        query.EXPERIMENT,
        baseline.EXPERIMENT,
        accuracy.EXPERIMENT,
        promoe.OVERALL,
        promoe.TECHNIQUE,
        promoe.RATE,
        scale.BATCH,
        scale.BIT,
        caching.HITS,
        caching.FIRST,
        splitting.LAYERS,
        splitting.RATIO,
        inputs.EXPERIMENT,
        speed.LATENCY,
        speed.MEMORY,
        speed.ABLATION,
        sensitivity.EXPERIMENT,
    )
}

ALL = "all"


def select(names: str) -> list[Experiment]:
    """Those of `all`, `PAPER` or `PAPER:FIGURE`, several with commas between them, in the order of EXPERIMENTS.

    Raises ConfigError naming what is accepted.
    """
    chosen: set[str] = set()
    for name in names.split(","):
        name = name.strip()
        paper, colon, figure = name.partition(":")
        if name != ALL and paper not in PAPERS:
            accepted = ", ".join((ALL, *PAPERS, *(f"{paper}:FIGURE" for paper in PAPERS)))
            raise ConfigError(f"paper={name!r:.80}: unknown; accepted: {accepted}")
        own = [one for one in EXPERIMENTS.values() if name == ALL or one.paper == paper]
        found = [one for one in own if not colon or figure in one.figures]
        if not found:
            accepted = ", ".join(figure for one in own for figure in one.figures)
            raise ConfigError(f"figure={figure!r:.80}: none of {paper}'s; accepted: {accepted}")
        chosen |= {one.name for one in found}
    return [one for name, one in EXPERIMENTS.items() if name in chosen]
