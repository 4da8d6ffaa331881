"""`expertly bench`: how fast a model runs here, and how fast it could at best.

Writes a report to look at. `expertly lab compare` has more to set, and takes recorded traces.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from expertly.cli import compare
from expertly.cli.arguments import temperature
from expertly.lab.prompts import PROMPTS_HELP, RAW_HELP
from expertly.options import MODEL_HELP, argument, json_flag, option

DEFAULT_SYSTEMS = "lru,expertly"


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    model: str | None = argument(None, MODEL_HELP, metavar="MODEL")
    memory: str = option("10%,25%,50%", "for experts: shares of them or amounts", metavar="SIZE,SIZE")
    system: str = option(DEFAULT_SYSTEMS, "what `expertly lab systems` lists", metavar="A,B")
    prompts: str | None = option(None, PROMPTS_HELP + " (default: ours)", metavar="FILE")
    raw: bool = option(False, RAW_HELP)
    requests: int = option(5, "prompts that are answered", metavar="N", least=1)
    tokens: int = option(24, "of each answer", metavar="N", least=1)
    rounds: int = option(2, "times that everything is run", metavar="N", least=1)
    temperature: float = option(0.8, "of the answers, 0 is greedy", metavar="X", type=temperature)
    out: Path | None = option(None, "where the report goes (default: a new folder here)", metavar="DIR", type=Path)
    json: bool = json_flag()


def run(args: BenchOptions) -> int:
    out = args.out or Path(time.strftime("expertly-bench-%Y-%m-%d-%H%M%S"))
    return compare.run(
        compare.CompareOptions(
            source=args.model,
            memory=args.memory,
            system=args.system,
            prompts=args.prompts,
            raw=args.raw,
            requests=args.requests,
            tokens=args.tokens,
            rounds=args.rounds,
            temperature=args.temperature,
            out=out,
            json=args.json,
        )
    )
