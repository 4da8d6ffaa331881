"""What `expertly lab configure` says: a row a layer, what is expected of it, and how to use it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from expertly.cli.configure import SYSTEM
from expertly.cli.configure_sources import ConfiguratorInput, is_trace, segments_of
from expertly.cli.output import table
from expertly.core.units import format_nbytes, format_seconds, format_share

if TYPE_CHECKING:
    from expertly.cli.configure import ConfigureOptions
    from expertly.policies.allocation.moepic import Configuration
    from expertly.scheduler.budget import Budget

Found = tuple[str, "Budget", "Configuration", float]
"""What was asked for, the slots that it gives, what was found and the seconds that it took."""


def result_of(args: ConfigureOptions, seen: ConfiguratorInput, found: Sequence[Found]) -> dict[str, Any]:
    """All numbers, for --json."""
    geometry, timing, rates = seen.geometry, seen.timing, seen.rates
    return {
        "model": seen.model,
        "source": args.source,
        "is_trace": is_trace(args.source),
        "segments": geometry.segments_per_expert,
        "expert_bytes": geometry.nbytes,
        "zeta": args.zeta,
        "requests": rates.num_requests,
        "tokens": rates.num_tokens,
        "predicted_share": rates.predicted_share,
        "split": None if args.split is None else f"{args.split[0]}:{args.split[1]}",
        "times": seen.times,
        "timing": {
            key.replace("_ns", "_s"): _seconds(value) for key, value in asdict(timing).items() if key != "top_k"
        },
        "rates": [
            {"hits": one.hits.tolist(), "accuracy": one.accuracy[:top_k].tolist()}
            for one, top_k in zip(rates.layers, timing.top_k, strict=True)
        ],
        "notes": seen.notes,
        "out": None if args.out is None else str(args.out),
        "results": [_result(args, seen, *one) for one in found],
    }


def _result(
    args: ConfigureOptions, seen: ConfiguratorInput, memory: str, budget: Budget, found: Configuration, seconds: float
) -> dict[str, Any]:
    geometry, num_segments = seen.geometry, seen.geometry.segments_per_expert
    layers = []
    for number, (split, outcome) in enumerate(zip(found.plan.layers, found.outcomes, strict=True)):
        rates, top_k = seen.rates.layers[number], seen.timing.top_k[number]
        layers.append(
            {
                "layer": number,
                "experts": rates.num_experts,
                "top_k": top_k,
                "budget_segments": split.budget_segments,
                "budget_experts": split.budget_segments / num_segments,
                "kept_experts": split.kept_experts,
                "kept_segments": split.kept_segments,
                "theta": split.kept_segments / num_segments,
                "hit_rate": float(rates.hits[split.kept_experts]),
                "predicted_rate": float(rates.accuracy[:top_k].sum()) / top_k,
                "window_s": outcome.window_ns / 1e9,
                "loaded_experts": outcome.loaded,
                "uniform_exposed_s": found.start_exposed_ns[number] / 1e9,
                "equal_budgets_exposed_s": found.uniform_exposed_ns[number] / 1e9,
                "exposed_s": outcome.exposed_ns / 1e9,
            }
        )
    return {
        "memory": memory,
        "memory_bytes": budget.kept_nbytes(geometry) + budget.ring_nbytes(geometry),
        "ring_segments": list(budget.ring_slots),
        "kept_segments": list(budget.kept_slots),
        "kept_experts": sum(budget.kept_slots) / num_segments,
        "free_segments": list(found.plan.free_segments),
        **{f"{name}_exposed_s": sum(times) / 1e9 for name, times in _exposed(found).items()},
        "exposed_s": sum(one.exposed_ns for one in found.outcomes) / 1e9,
        "moves": found.num_moves,
        "seconds": seconds,
        "layers": layers,
        "command": _command(args, seen, memory),
    }


def _exposed(found: Configuration) -> dict[str, tuple[float, ...]]:
    """Of what the configurator began with (theta 0.5), and of equal budgets with the best splits."""
    return {"uniform": found.start_exposed_ns, "equal_budgets": found.uniform_exposed_ns}


def _seconds(value: Any) -> Any:
    return value / 1e9 if isinstance(value, int) else [one / 1e9 for one in value]


def _command(args: ConfigureOptions, seen: ConfiguratorInput, memory: str) -> str:
    """What to type to run with the plan."""
    of_trace = is_trace(args.source)
    words = ["expertly", "lab", "simulate"] if of_trace else ["expertly", "run"]
    words += [args.source or "demo"] if of_trace else [args.source or "demo", "Once upon a time"]
    words += ["--system", SYSTEM, "--memory", memory, "--plan", "FILE" if args.out is None else str(args.out)]
    if seen.geometry.segments_per_expert != segments_of(seen.geometry.layers, None):
        words += ["--segments", str(seen.geometry.segments_per_expert)]
    given = {"hardware": args.hardware, "geometry": args.geometry, "seed": args.seed} if of_trace else {}
    given |= {"split": None if args.split is None else f"{args.split[0]}:{args.split[1]}"}
    given |= {} if of_trace else {"dtype": args.dtype, "device": args.device}
    for name, value in given.items():
        words += [] if value is None else [f"--{name}", str(value)]
    return shlex.join(words)


def report(result: dict[str, Any]) -> str:
    """For people."""
    head = (
        f"{result['model']}: {format_nbytes(result['expert_bytes'])} of experts in {len(result['rates'])} layers, "
        f"P = {result['segments']}\n"
        f"learned from {result['tokens']} decoded tokens of {result['requests']} requests\n"
        f"times: {result['times']}"
    )
    parts = [head, *(_of_memory(result, one) for one in result["results"])]
    return "\n\n".join([*parts, "\n".join(result["notes"])] if result["notes"] else parts)


def _of_memory(result: dict[str, Any], found: dict[str, Any]) -> str:
    before, after = found["uniform_exposed_s"], found["exposed_s"]
    gain = f" ({format_share(1 - after / before)} less)" if before else ""
    lines = [
        f"memory {found['memory']} = {format_nbytes(found['memory_bytes'])}, {found['kept_experts']:.4g} experts kept; "
        "times in ms",
        _layer_table(found),
        f"exposed ms per token, predicted: {_ms(before)} uniform -> {_ms(after)} configured{gain}",
        f"({_ms(found['equal_budgets_exposed_s'])} with equal budgets, each layer's best theta; found in "
        f"{format_seconds(found['seconds'])}, {found['moves']} moves)",
        f"{'use it' if result['out'] is not None else 'save it with --out FILE, use it with'}: {found['command']}",
    ]
    return "\n".join(lines)


def _layer_table(found: dict[str, Any]) -> str:
    """V, C, theta, H(C), the mean of P(1..K), T_wind, m, and what is expected to be exposed."""
    headers = ("layer", "budget", "keeps", "theta", "hits", "right", "window", "m", "uniform", "configured")
    rows = []
    for one in found["layers"]:
        rows.append(
            (
                str(one["layer"]),
                f"{one['budget_experts']:.4g}",
                str(one["kept_experts"]),
                f"{one['theta']:g}",
                format_share(one["hit_rate"]),
                format_share(one["predicted_rate"]),
                _ms(one["window_s"]),
                f"{one['loaded_experts']:.2f}",
                _ms(one["uniform_exposed_s"]),
                _ms(one["exposed_s"]),
            )
        )
    budget = sum(one["budget_experts"] for one in found["layers"])
    sums = (_ms(found["uniform_exposed_s"]), _ms(found["exposed_s"]))
    return table(headers, [*rows, ("all", f"{budget:.4g}", *[""] * 6, *sums)])


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"
