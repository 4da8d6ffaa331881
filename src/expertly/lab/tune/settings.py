"""The options of tuning, as the command line and `tune` take them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expertly.arguments import duration, seed
from expertly.lab.prompts import PROMPTS_HELP, RAW_HELP
from expertly.options import ADVANCED, argument, json_flag, load_option, option, path_option


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    model: str | None = argument(None, "a folder, a packed store or a hub id", metavar="MODEL")
    prompts: str | None = option(None, "what you ask of it. " + PROMPTS_HELP, metavar="FILE")
    raw: bool = option(False, RAW_HELP)
    memory: str = load_option("memory")
    total_memory: str | None = load_option("total_memory")
    requests: int = option(
        16, "how many of the prompts are answered; half are learned from, half try the systems", least=1
    )
    max_new_tokens: int = option(64, "length of an answer in tokens", least=1)
    time_limit: Any = option("5m", "for everything, in seconds or minutes: 90s, 5m", metavar="TIME", type=duration)
    dtype: str | None = load_option("dtype")
    codec: str = load_option("codec")
    device: str | None = load_option("device")
    predictor: str = load_option("predictor")
    seed: Any = option(0, "of sampling, and of the halves", metavar="N", type=seed, panel=ADVANCED)
    out: Path | None = path_option(None, "a file for everything that was measured, as --json prints it")
    json: bool = json_flag()
