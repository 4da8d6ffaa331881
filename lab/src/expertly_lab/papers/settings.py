"""The options of `expertly lab reproduce`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expertly.options import ADVANCED, argument, jobs_option, json_flag, option, path_option, seed

TOKENS, QUICK_TOKENS = 600, 150
"""Decoded tokens that are simulated; all that there are, where it is fewer."""


@dataclass(frozen=True, kw_only=True)
class ReproduceOptions:
    paper: str | None = argument(
        None,
        "fmoe, moe-infinity, promoe, moepic, expertly (ours) or one of your own (docs/extending.md); one figure or "
        "table of one (moepic:table-1); or all; several with commas between them",
        metavar="PAPER[:FIGURE]",
    )
    trace: list[Path] | None = path_option(
        None,
        "a trace made by `expertly lab trace record --full`, imported routing, or demo (the default): the demo model's "
        "answers to some prompts, recorded once; may be given several times",
        "DIR",
        is_several=True,
    )
    predictor: list[Path] | None = path_option(
        None,
        "trained weights, for ProMoE or a predictor of yours; may be given several times",
        is_several=True,
        panel=ADVANCED,
    )
    list: bool = option(False, "list the experiments and what they need, and do nothing else")
    arrivals: Path | None = path_option(None, "CSV of arrivals and lengths, for fmoe:10", panel=ADVANCED)
    quick: bool = option(False, "few tokens, little to learn from: seconds an experiment, with wide intervals")
    tokens: int | None = option(
        None,
        f"decoded tokens of a trace that are simulated; by default {TOKENS}, with --quick {QUICK_TOKENS}",
        least=1,
        panel=ADVANCED,
    )
    seed: Any = option(0, "parts the requests into those that are learned from and the rest", type=seed, panel=ADVANCED)
    jobs: int | None = jobs_option("traces of experiments")
    out: Path | None = path_option(None, "folder for a page of verdicts, one page a paper, and results.json")
    json: bool = json_flag()

    @property
    def num_tokens(self) -> int:
        return self.tokens or (QUICK_TOKENS if self.quick else TOKENS)
