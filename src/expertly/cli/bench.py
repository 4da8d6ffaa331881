"""`expertly bench`: which system is fastest for a model here.

Runs `lru`, `expertly`, `expertly-ahead` and the systems you name in turns, with the same prompts. They write the same
tokens, so only speed differs. --save remembers the fastest, and `--system auto`, the default, then uses it. Exit code
2 where a system failed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from expertly.cli.output import Column, budgets_table, message, progress_bar, reserved_stdout, show
from expertly.core.errors import StoreError
from expertly.core.resources import cpu_name
from expertly.core.units import (
    counted,
    format_nbytes,
    format_number,
    format_range,
    format_ratio,
    format_seconds,
    format_share,
)
from expertly.data import demo_prompts
from expertly.model.prompts import PROMPTS_HELP, RAW_HELP, read_prompts
from expertly.options import ADVANCED, MODEL_HELP, argument, check_one_memory, json_flag, load_option, names, option
from expertly.scheduler.systems import SYSTEMS

if TYPE_CHECKING:
    from expertly.bench import Bench, BenchRow

DEFAULT_MEMORY = "25%"


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    model: str | None = argument(None, MODEL_HELP, metavar="MODEL")
    system: str | None = option(None, "systems to run beside the usual ones, see `expertly systems`", metavar="A,B")
    memory: str | None = option(
        None, f"for experts: shares of them, amounts or auto (default: {DEFAULT_MEMORY})", metavar="SIZE,SIZE"
    )
    total_memory: str | None = option(
        None, "instead of memory: amounts for everything, as `run` takes them", metavar="SIZE,SIZE"
    )
    save: bool = option(False, "remember the fastest for this model, machine and memory")
    prompts: str | None = option(None, PROMPTS_HELP, metavar="FILE")
    requests: int = option(5, "how many prompts are answered", least=1)
    tokens: int = option(24, "of each answer, at most", least=1)
    rounds: int = option(3, "how often everything runs", least=1)
    raw: bool = option(False, RAW_HELP, panel=ADVANCED)
    dtype: str | None = load_option("dtype")
    device: str | None = load_option("device")
    quantize: str | None = load_option("quantize")
    json: bool = json_flag()


def run(args: BenchOptions) -> int:
    check_one_memory(args.memory, args.total_memory)
    field = "memory" if args.total_memory is None else "total_memory"
    memories = [{field: size} for size in names(field, args.total_memory or args.memory or DEFAULT_MEMORY)]
    prompts = read_prompts(str(demo_prompts()) if args.prompts is None else args.prompts, args.requests)
    with reserved_stdout() as stdout:
        from expertly.bench import USUAL, Bench, BenchSettings, fastest

        more = [] if args.system is None else names("system", args.system)
        load = {"dtype": args.dtype, "device": args.device, "quantize": args.quantize}
        systems = tuple(dict.fromkeys([*USUAL, *more]))
        settings = BenchSettings(args.model, load, systems, args.tokens, args.rounds, args.raw)
        with progress_bar("turns") as progress:
            bench = Bench(settings, progress, progress.in_bytes)
            budgets, requests, notes = bench.prepare(memories, prompts)
            if args.prompts is None:
                notes.append(f"no --prompts: measured with {counted(len(requests), 'text')} of ours, not with yours")
            by_budget = [bench.run(budget, requests, len(budgets)) for budget in budgets]
        for note in notes:
            message(f"expertly: {note}")
        best = [row for row in map(fastest, by_budget) if row is not None]
        rows = [asdict(row) for rows in by_budget for row in rows]
        failed, saved = any(row["reason"] is not None for row in rows), None
        try:
            saved = _save(bench, best, args.device) if args.save else None
        except StoreError as error:  # the results are printed all the same
            failed = True
            message(f"expertly: error: {error}")
        result = {
            "model": args.model or "demo",
            "cpu": cpu_name(),
            "requests": len(requests),
            "tokens": args.tokens,
            "rounds": args.rounds,
            "rows": rows,
            "fastest": [asdict(row) for row in best],
            "saved": saved,
        }
        show(result, args.json, lambda: report(result), stdout)
    return 2 if failed else 0


def _save(bench: Bench, best: Sequence[BenchRow], device: str | None) -> str | None:
    """Remember the fastest systems that are presets; returns the file. Raises StoreError."""
    from expertly.engine.device import choose_device
    from expertly.engine.remembered import FastestSystem, remember, this_machine

    assert bench.store is not None
    saved, machine = None, this_machine(choose_device(device))
    for row in best:
        if row.system in SYSTEMS.built_in:
            saved = str(remember(bench.store, FastestSystem(row.system, row.memory_bytes, machine)))
        else:
            message(f"expertly: {row.system} is not saved; accepted: {', '.join(SYSTEMS.built_in)}")
    return saved


def report(result: Mapping[str, Any]) -> str:
    rows = [row | {"spread": _spread(row)} for row in result["rows"]]
    size = f"{counted(result['requests'], 'prompt')}, {result['tokens']} tokens each"
    lines = [f"{result['model']}: {size}, {counted(result['rounds'], 'round')}", "", budgets_table(rows, _COLUMNS), ""]
    failures = [row for row in rows if row["reason"] is not None]
    lines += [f"{row['system']} failed in {row['memory']}: {row['reason']}" for row in failures]
    lines += [f"fastest in {format_nbytes(row['memory_bytes'])}: {row['system']}" for row in result["fastest"]]
    if result["saved"] is not None:
        lines.append(f"saved in {result['saved']}: --system auto uses it")
    return "\n".join(lines)


def _spread(row: Mapping[str, Any]) -> str | None:
    """Ratios of all rounds: the median, and from the smallest to the largest."""
    if row["ratio"] is None:
        return None
    return f"{format_ratio(row['ratio'])} ({format_range(format_ratio, row['ratio_low'], row['ratio_high'])})"


_COLUMNS: dict[str, Column] = {
    "TPOT": ("tpot_s", format_seconds),
    "TTFT": ("ttft_s", format_seconds),
    "tokens/s": ("tokens_per_s", format_number),
    "hit rate": ("hit_rate", format_share),
    "loaded a token": ("bytes_per_token", format_nbytes),
    "to lru": ("spread", str),
}
