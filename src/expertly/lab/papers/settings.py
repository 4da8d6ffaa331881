"""The options of running experiments, as the command line and `Session` take them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expertly.arguments import names, seed
from expertly.options import ADVANCED, argument, jobs_option, json_flag, option, path_option

TOKENS, QUICK_TOKENS = 5000, 150
"""Decoded tokens that are simulated, over all seeds; all that there are, where it is fewer."""
SEEDS, QUICK_SEEDS = 3, 1
"""Each parts the requests anew into those that are learned from and those that are simulated."""


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
        "a trace made by `expertly lab trace record --full`, or imported routing; may be given several times",
        "DIR",
        is_several=True,
    )
    system: str | None = option(
        None,
        "systems of yours beside the paper's, in the tables of comparisons: no claim counts them",
        metavar="A,B",
        panel=ADVANCED,
    )
    hardware: str | None = option(
        None, "a shipped profile or a TOML file, instead of the paper's machine", metavar="NAME", panel=ADVANCED
    )
    memory: str | None = option(
        None,
        "a share of the experts or an amount, instead of the one budget of an experiment",
        metavar="SIZE",
        panel=ADVANCED,
    )
    predictor: list[Path] | None = path_option(
        None,
        "trained weights, for ProMoE or a predictor of yours; may be given several times",
        is_several=True,
        panel=ADVANCED,
    )
    fewer: list[str] | None = option(
        None,
        "experiments that simulate another number of tokens; may be given several times",
        metavar="N:A,B",
        panel=ADVANCED,
        is_several=True,
    )
    list: bool = option(False, "list the experiments and what they need, and do nothing else")
    arrivals: Path | None = path_option(None, "CSV of arrivals and lengths, for fmoe:10", panel=ADVANCED)
    quick: bool = option(False, "few tokens and one seed: under a minute an experiment, with wide intervals")
    tokens: int | None = option(
        None,
        f"decoded tokens of a trace that are simulated, over all seeds; by default {TOKENS}, with --quick "
        f"{QUICK_TOKENS}",
        least=1,
        panel=ADVANCED,
    )
    seeds: int | None = option(
        None,
        f"how many seeds; each learns from other requests; by default {SEEDS}, with --quick {QUICK_SEEDS}",
        least=1,
        panel=ADVANCED,
    )
    seed: Any = option(0, "the first seed", metavar="N", type=seed, panel=ADVANCED)
    jobs: int | None = jobs_option("traces of experiments")
    out: Path | None = path_option(
        None, "FILE.md for the page of verdicts, with FILE/ behind it; or a folder for both and results.json"
    )
    reuse: Path | None = path_option(
        None, "results.json of an earlier run with the same traces and settings: what is in it is not run again"
    )
    json: bool = json_flag()

    @property
    def num_tokens(self) -> int:
        return self.tokens or (QUICK_TOKENS if self.quick else TOKENS)

    @property
    def num_seeds(self) -> int:
        return self.seeds or (QUICK_SEEDS if self.quick else SEEDS)

    @property
    def systems(self) -> Sequence[str]:
        """Raises ConfigError where the list has a hole."""
        return () if self.system is None else names("system", self.system)
