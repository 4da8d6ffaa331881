"""What is ours, and what the order of systems depends on."""

from __future__ import annotations

from expertly_lab.papers.experiment import Experiment, Paper, Sweep
from expertly_lab.papers.judge import LOADED, TPOT, Better

AHEAD = ("expertly-ahead", "lru", "on-demand", "fmoe", "moe-infinity", "promoe", "moepic")

PAPER = Paper(
    "expertly",
    "Ours: what no paper shows",
    [
        Experiment(
            "memory",
            "All systems by memory",
            "no paper; `expertly` evicts by learned reuse and prefetches nothing.",
            [
                Better("`expertly` loads the fewest bytes", LOADED, "expertly"),
                Better("`expertly-ahead` has the lowest TPOT", TPOT, "expertly-ahead"),
            ],
            {name: name for name in ("expertly", *AHEAD)},
            Sweep("memory", ("10%", "25%", "50%")),
        ),
        Experiment(
            "links",
            "Whose link turns the order round",
            "no paper says which of its results another machine would turn round.",
            [
                Better("`expertly-ahead` has the lowest TPOT on a slow and a fast link", TPOT, "expertly-ahead"),
                Better("with a link 6 times as fast `lru` is as good as what prefetches", TPOT, "lru", at=("6",)),
            ],
            {name: name for name in AHEAD},
            Sweep("links", (0.5, 6)),
        ),
    ],
)
