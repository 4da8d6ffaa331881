"""ProMoE: figures 3 to 5, 8, 9 and 11 to 25, in the simulator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from expertly.core.geometry import Geometry
from expertly.lab.accuracy import Accuracy, accuracies, is_below, means
from expertly.lab.dataset import Dataset
from expertly.lab.papers import findings as rules
from expertly.lab.papers.findings import NEGLIGIBLE, Cell, Check, Finding, FindingTable, Why, experiment, show
from expertly.lab.papers.measured import Estimate, Floats, redrawn
from expertly.lab.papers.metrics import (
    HALF,
    HITS,
    TPOT,
    TTFT,
    WAITING,
    Metric,
    grid,
    of_categories,
    of_prompts,
    of_steps,
    of_time,
    table_of,
)
from expertly.lab.papers.runs import Lab, Row, Runs, batched, prompts_need
from expertly.scheduler.counters import PhaseCounters
from expertly.scheduler.presets import get_system
from expertly.sim.hardware import Hardware
from expertly.sim.study import Memory
from expertly.sim.training import popularity

Ints = npt.NDArray[np.int64]

HARDWARE = "rtx4090"
LRU = "lru:order=id:preemption=late"
SYSTEMS = {"static": "static:order=id:preemption=late", "lru": LRU, "promoe": "promoe"}
RATES = ("10%", "25%", "50%", "75%")
BLOCKED = Metric("of it blocked", "share", lambda row: row.waiting(False))

# -- 3 to 5: what an LRU cache leaves to wait for, and how evenly experts are used ----------------------------------

LARGE = 0.5
"""Of decode, blocked at half of the experts: most of it, where the paper has 60.4 and 79.0 %."""


@experiment("promoe:3", also=("4", "5"))
def baseline(lab: Lab) -> Finding:
    """LRU: latency, blocking share and access by popularity

    With half of the experts kept 60.4 % of decode and 82.7 % of prefill are blocked (DS-1, transformers), 79.0 and
    94.2 % (QW-2, llama.cpp); latency falls with the cache rate; modern models use experts nearly evenly, older ones by
    a power law (figure 5).
    """
    runs = lab.runs(HARDWARE)
    found = {rate: runs.row(LRU, rate) for rate in RATES}
    half = found["50%"]
    blocked, in_prompts = half.waiting(True) or 0.0, half.waiting(False)
    cdf = _served(lab, runs)
    checks: list[Check | None] = [
        TPOT.monotonic("TPOT falls with the cache rate", found, rises=False),
        mostly_blocked(blocked, f"{half.hit_rate:.1%} are hits at 50 %: tokens share more experts than the paper's"),
    ]
    if in_prompts is not None:
        checks.append(
            rules.above(
                "and a larger part of prompts",
                {"blocked in prompts": in_prompts, "in decode": blocked},
                lambda: f"{of_prompts(half)}; in decode {of_steps(half)}",
                unit="share",
                paper="82.7 % of prompts, 60.4 % of decode; 94.2 and 79.0 %",
            )
        )
    why = f"the requests are of {of_categories(lab)}; the popular half serves {show(cdf[0.5], 'share')}"
    checks.append(evenly(cdf[0.25], lab.num_experts, why))
    tables = [
        table_of(f"3, 4: `{LRU}`", found, TTFT, BLOCKED, TPOT, WAITING, HITS, key="kept"),
        FindingTable.of("5: access by popularity", {"most popular": "share", "serve": "share"}, [*cdf.items()]),
    ]
    return lab.finding(lab.setting(runs), tables, checks)


def mostly_blocked(share: float, why: Why) -> Check:
    """Of decode, with half of the experts kept."""
    return rules.above(
        "with half of the experts kept most of decode is blocked still",
        {"blocked in decode": share, "half of it": LARGE},
        why,
        unit="share",
        paper="60.4 % and 79.0 %",
    )


def evenly(quarter: float, num_experts: int, why: Why) -> Check:
    """What the most popular quarter serves is nearer to what it would if use were even than to a power law (Zipf's)."""
    uses = 1 / np.arange(1, num_experts + 1)
    power = float(uses[: -(-num_experts // 4)].sum() / uses.sum())
    return rules.below(
        "5: use of experts is nearer to even than to a power law",
        {"the most popular quarter serves": quarter, "half way from a quarter to a power law's": (0.25 + power) / 2},
        why,
        unit="share",
        paper="nearly the diagonal (a figure without numbers)",
    )


def _served(lab: Lab, runs: Runs) -> dict[float, float]:
    """Of demands, by the most popular part of a layer's experts; the mean over layers. The requests are those of the
    training part of the first seed.
    """
    layers = len(lab.subject.layers)
    uses = np.zeros((len(runs.study.schedule.training), layers, lab.num_experts))
    for number, span in enumerate(runs.study.schedule.training):
        for key, count in popularity(lab.trace, [span], Geometry(lab.subject.layers)).items():
            uses[number, key // lab.num_experts, key % lab.num_experts] = count
    nums = {part: -(-int(lab.num_experts * part * 100) // 100) for part in (0.1, 0.25, 0.5, 0.75)}
    summed = [np.sort(np.tensordot(weights, uses, 1), axis=1)[:, ::-1].cumsum(axis=1) for weights in redrawn(len(uses))]
    whole = np.sort(uses.sum(axis=0), axis=1)[:, ::-1].cumsum(axis=1)

    def served(summed: Floats, num: int) -> float:
        return float((summed[:, num - 1] / np.maximum(summed[:, -1], 1)).mean())

    draws = {part: np.array([served(one, num) for one in summed]) for part, num in nums.items()}
    return {part: Estimate.around(served(whole, num), draws[part]) for part, num in nums.items()}


# -- 8, 9: how often predictors are right --------------------------------------------------------------------------

LEARNED_AT = (2, 4, 8)


@experiment("promoe:8", also=("9",), needs=("router_inputs", "lookahead", "weights"), most=1)
def accuracy(lab: Lab) -> Finding:
    """Accuracy of predictors by layer and distance

    Token id 54 % on average; skip prediction 90.5 % at k = 1, 54.5 % at k = 8, then worse than the token id (DS-2);
    the learned predictor stays highest at k = 2, 4, 8, in QW-2's layers 16 and 27, too.
    """
    (schedule, *_) = lab.schedules(len(lab.seeds))  # the networks learned from one part: other seeds test no others
    training, weights = schedule.training, lab.subject.weights
    assert weights is not None, "an experiment's needs are met"
    spans = [*training, *schedule.test]
    data = Dataset(lab.trace, spans)
    owner = np.repeat(np.arange(-len(training), len(schedule.test)), [one.num_rows for one in spans])

    def by_request(right: Ints, named: Ints, rows: Ints) -> float:
        return Estimate.mean(*(np.bincount(owner[rows], one, len(schedule.test)) for one in (right, named)))

    found, num_judged = accuracies(lab.trace, data, training, schedule.test, weights, by_request)
    num = sum(span.num_rows for span in training)
    mean = means(found)
    at = {(one.layer, one.distance): one for one in found}

    def right(layer: int, k: int, name: str) -> float | None:
        one: Accuracy | None = at.get((layer, k))
        return None if one is None else getattr(one, name)

    cells: list[tuple[Cell, ...]] = [
        (k, row["learned"], row["lookahead"], row["token_id"], row["lookahead_below_token_id"])
        for k, row in mean.items()
    ]
    by_layer: list[tuple[Cell, ...]] = [
        (layer, *(right(layer, k, name) for k in mean for name in ("learned", "lookahead")))
        for layer in sorted({one.layer for one in found})
    ]
    num_layers = len(lab.subject.layers)
    from_first = ", ".join(f"{min(k, num_layers)} at k = {k}" for k in mean)
    first_layer = f"layers nearer to the first than k are predicted from it, {from_first} of {num_layers}"
    others = {
        k: max(("lookahead", "token_id"), key=lambda name: -1.0 if mean[k][name] is None else mean[k][name])
        for k in LEARNED_AT
        if k in mean
    }
    last, skip, learned = max(mean), *({k: row[name] for k, row in mean.items()} for name in ("lookahead", "learned"))
    checks = [
        rules.everywhere(
            "the learned predictor is better than both others",
            {
                f"k={k}": rules.compare(("learned", other), mean[k], lowest=False, slack=-NEGLIGIBLE)
                for k, other in others.items()
            },
            "mean over layers, at k = 2, 4, 8",
            f"{lab.subject.weights_note}; {num} tokens of it count token ids",
            unit="share",
        ),
        rules.monotonic(
            "skip prediction gets worse with k",
            {f"k={k}": value for k, value in skip.items()},
            first_layer,
            rises=False,
            unit="share",
            paper="from 90.5 to 54.5 %",
        ),
        rules.below(
            "from k = 8 on skip prediction is about as good as the token id, or worse",
            {"skip at the largest k": skip[last], "token id": mean[last]["token_id"]},
            first_layer,
            unit="share",
            by=-0.02,
            paper="54.5 and 54 %",
        ),
        keeps_accuracy(learned, skip, first_layer),
    ]
    crossover = next((k for k, row in mean.items() if row["lookahead"] < row["token_id"]), None)
    below = sum(is_below(one) for one in found)
    notes = [
        f"skip prediction falls below the token id from k = {crossover} on in the mean (the paper: past 8, with 26 "
        f"layers; {num_layers} here), and in {below} of {len(found)} pairs of layer and distance",
        "a layer nearer to the first than k is predicted from the first, by skip prediction too",
    ]
    columns = {"k": "", "learned": "share", "skip": "share", "token id": "share", "layers skip < token id": ""}
    columns_of = {"layer": "", **{f"{name}, k={k}": "share" for k in mean for name in ("learned", "skip")}}
    tables = [
        FindingTable.of("Mean over layers: right, of the K named", columns, cells),
        FindingTable.of("By layer", columns_of, by_layer),
    ]
    setting = f"{num_judged} decode tokens; token ids counted over {num} tokens; {lab.subject.weights_note}"
    return lab.finding(setting, tables, checks, notes)


def keeps_accuracy(learned: Mapping[int, float], skip: Mapping[int, float], why: Why) -> Check:
    """By distance."""
    first, last = min(skip), max(skip)
    return rules.below(
        "the learned predictor keeps its accuracy with the distance better than skip prediction does",
        {f"learned loses from k = {first} to {last}": learned[first] - learned[last], "skip": skip[first] - skip[last]},
        why,
        unit="share",
        paper="skip loses 36 points from k = 1 to 8, the learned one few (a figure without numbers)",
    )


# -- 11 to 17: beside static and LRU caches, technique by technique, and by how much is kept ------------------------


def fastest(rows: dict[str, Row], where: str = "", paper: Sequence[str] = ("", "")) -> list[Check | None]:
    """ProMoE before static and LRU in prompts and in decode. `paper`: how many times faster, in both."""
    return [
        metric.best(f"ProMoE has the lowest {metric.header}{where}", rows, "promoe", paper=times)
        for metric, times in zip((TTFT, TPOT), paper, strict=True)
    ]


@experiment("promoe:11", also=("12",))
def overall(lab: Lab) -> Finding:
    """Beside static and LRU caches

    Prefill 1.52x and 2.32x faster than static and LRU, decode 1.52x and 1.33x (transformers); 1.36x and 2.12x,
    1.49x and 1.09x (llama.cpp). LRU thrashes in prefill, and is faster than static in decode.
    """
    runs = lab.runs(HARDWARE)
    rows = runs.rows(SYSTEMS, "50%")
    checks = [
        *fastest(rows, paper=("1.52x and 2.32x, 1.36x and 2.12x faster", "1.52x and 1.33x, 1.49x and 1.09x faster")),
        TPOT.better(
            "LRU is faster than static in decode",
            rows,
            "lru",
            "static",
            f"static hits {rows['static'].hit_rate:.1%}, LRU {rows['lru'].hit_rate:.1%}",
        ),
        TTFT.better(
            "and slower in prompts, by thrashing",
            rows,
            "static",
            "lru",
            lambda: of_prompts(rows["lru"], rows["static"]),
        ),
    ]
    ours = rows["promoe"]
    faster, faster_decode = TTFT.times(ours, "ProMoE is faster"), TPOT.times(ours, "ProMoE is faster, decode")
    table = table_of("At half of the experts", rows, TTFT, faster, TPOT, faster_decode)
    return lab.finding(lab.setting(runs, "50%"), [table], checks)


TECHNIQUES = {
    "LRU, by id, late": LRU,
    "+ prefetch": "promoe:order=id:preemption=late:segments=1",
    "+ chunked": "promoe:order=id:preemption=late",
    "+ early preemption": "promoe:order=id",
    "+ reordered": "promoe",
}


def _reads(runs: Runs, system: str, memory: str) -> float | None:
    """What prompts demanded, in units of what was absent when their routers spoke: above 1 something was read twice."""
    parts = get_system(runs.subject.fitted(system)[0])
    found = []
    for study in runs.studies:
        prompts = PhaseCounters()
        simulator = study.simulate(parts, Memory(memory).budget(study.geometry_of(parts)))
        for counters in simulator.scheduler.counters:
            prompts.add(counters.prefill)
        absent = prompts.demanded_nbytes - prompts.hit_nbytes
        if absent:
            found.append((prompts.loaded_nbytes - prompts.prefetched_nbytes) / absent)
    return Estimate.of_seeds(found) if found else None


@experiment("promoe:13", also=("14",))
def techniques(lab: Lab) -> Finding:
    """Technique by technique

    In prefill prefetching alone brings little or costs, early preemption 1.27x and reordered inference 2.29x; in
    decode each technique brings something, 1.37x in all (transformers; llama.cpp alike).
    """
    runs = lab.runs(HARDWARE)
    rows = runs.rows(TECHNIQUES)
    base, whole = rows["LRU, by id, late"], rows["+ reordered"]
    has_prompts = lab.subject.has_prompts
    reads = {label: _reads(runs, system, "25%") if has_prompts else None for label, system in TECHNIQUES.items()}
    columns = {"": "", "TTFT": "ms", "of the first": "x", "read, of absent": "number", "TPOT": "ms"}
    columns["of the first, decode"] = "x"
    cells: list[tuple[Cell, ...]] = []
    for label, row in rows.items():
        ratio = row.ttft_s / base.ttft_s if has_prompts else None
        cells.append((label, row.ttft_s, ratio, reads[label], row.tpot_s, row.tpot_s / base.tpot_s))

    def why_slower() -> str:
        before, after = next((a, b) for a, b in pairwise(rows.values()) if b.tpot_s > a.tpot_s)
        is_cut = after["segments"] > before["segments"]
        return of_time(after, before) + ("; and every piece of an expert takes a launch of its own" if is_cut else "")

    checks: list[Check | None] = [
        TPOT.monotonic("in decode each technique makes it faster", rows, why_slower, rises=False, slack=0.005),
        *TPOT.sizes(
            "all of it takes less time in decode than", rows, "+ reordered", {"LRU, by id, late": 1 - 1 / 1.37}
        ),
    ]
    if has_prompts:
        checks += [
            *in_prompts(
                [rows[label].ttft_s for label in ("LRU, by id, late", "+ prefetch", "+ chunked", "+ reordered")],
                lambda: of_prompts(*rows.values()),
            ),
            rules.below(
                "reordering ends the thrash: nothing is read twice",
                {"read, of absent": reads["+ reordered"] or 0.0, "LRU by id": reads["LRU, by id, late"] or 0.0},
                lambda: of_prompts(whole, base),
            ),
        ]
    table = FindingTable.of("One technique after the other", columns, cells)
    return lab.finding(lab.setting(runs, "25%"), [table], checks)


LITTLE = 0.05


def in_prompts(times: Sequence[float], why: Why) -> list[Check]:
    """Times to the first token, of the first, with prefetching, in chunks, and with all techniques."""
    base, prefetch, chunked, reordered = times
    gains = {"early preemption and reordering": chunked - reordered, "prefetching in chunks": base - chunked}
    return [
        rules.above(
            "prefetching alone brings a prompt little, or costs",
            {"+ prefetch": prefetch, "LRU": base},
            why,
            slack=LITTLE,
            unit="ms",
            paper="brings little, and can cost",
        ),
        rules.above(
            "of what all of it brings a prompt, early preemption and reordering bring most",
            gains,
            why,
            unit="ms",
            paper="1.27x with early preemption, 2.29x with both",
        ),
        rules.above(
            "and with both a prompt is faster by half of what the paper has",
            {"LRU over + reordered": base / reordered, "half of the gain": 1 + HALF * (PAPER_PROMPTS - 1)},
            why,
            unit="x",
            paper=f"{PAPER_PROMPTS}x",
        ),
    ]


PAPER_PROMPTS = 2.29


@experiment("promoe:15", also=("16", "17"))
def rates(lab: Lab) -> Finding:
    """By cache rate, and what is waited for

    At all cache rates ProMoE is fastest: in prefill 1.72x and 1.75x before LRU, 1.22x and 1.43x before static
    (DS-1, QW-2), in decode 1.58x and 1.34x; loading on the critical path falls to 25.61 and 11.18 % of decode (LRU
    45.52 and 36.31 %).
    """
    runs = lab.runs(HARDWARE)
    found = {rate: runs.rows(SYSTEMS, rate) for rate in RATES}
    metrics = [TTFT, BLOCKED] * lab.subject.has_prompts + [TPOT, WAITING]
    tables = [grid(one.header, found, one, "kept") for one in metrics]
    paper = ("1.72x and 1.75x, 1.22x and 1.43x faster in the mean", "1.58x and 1.34x faster in the mean")
    checks = [check for rate, rows in found.items() for check in fastest(rows, f", {rate} kept", paper)]
    checks.append(WAITING.everywhere("and waits least in decode", found, "promoe"))
    return lab.finding(lab.setting(runs), tables, checks)


# -- 18 to 25: several requests at once, and fewer bits a weight -----------------------------------------------------

SIZES = (1, 2, 4)
BITS = (16, 8, 4)


@experiment("promoe:18", also=("19", "20", "21", "22"), most=1)
def batches(lab: Lab) -> Finding:
    """Throughput and latency by batch size

    Prefill throughput grows linearly with the batch, decode's hardly: experts used grow with it. ProMoE is 2.19x
    and 1.19x before LRU and static in prefill, 1.22x and 1.59x in decode (llama.cpp); over LRU the gain grows from
    1.16x to 1.34x from batch 1 to 4.
    """
    found = {size: batched(lab, HARDWARE, size).rows(SYSTEMS, "50%") for size in SIZES}
    gain = {size: rows["lru"].tpot_s / rows["promoe"].tpot_s for size, rows in found.items()}
    columns = {"batch": "", **{f"{name}, decode": "number" for name in SYSTEMS}, "ProMoE of LRU": "x"}
    cells: list[tuple[Cell, ...]] = [
        (size, *(size / row.tpot_s for row in rows.values()), gain[size]) for size, rows in found.items()
    ]
    tables = [FindingTable.of("Tokens a second of decode, about: batch over the time of a pass", columns, cells)]
    checks: list[Check | None] = []
    one, four = (found[size]["promoe"] for size in (1, 4))
    if lab.subject.has_prompts:
        tables.append(grid("Time of a batch's prompts", found, TTFT, "batch"))
        checks.append(
            rules.below(
                "four prompts together take much less than four times one",
                {"4 together, of one": four.ttft_s / one.ttft_s, "twice": 2.0},
                lambda: (
                    f"one prompt needs {show(prompts_need(lab, HARDWARE, 1), 'share')} of a layer's experts, "
                    f"four together {show(prompts_need(lab, HARDWARE, 4), 'share')}"
                ),
                unit="x",
                paper="throughput grows linearly with the batch: about once",
            )
        )
    checks += [check for size, rows in found.items() for check in fastest(rows, f", batch {size}")]
    checks += [
        rules.monotonic(
            "the gain over LRU grows with the batch",
            {str(size): value for size, value in gain.items()},
            lambda: of_time(four, found[4]["lru"]),
            rises=True,
            unit="x",
            slack=0.02,
            paper="from 1.16x to 1.34x",
        ),
        rules.above(
            "throughput of decode hardly grows: a pass of four takes most of four times as long",
            {"4 of 1": four.tpot_s / one.tpot_s, "half of the way to 4": 2.5},
            f"with half of the experts kept {four.hit_rate:.1%} are hits at batch 4: requests share experts",
            unit="x",
        ),
    ]
    setting = lab.setting(batched(lab, HARDWARE, 1), "50%")
    return lab.finding(setting, tables, checks, ["requests of a batch begin together"])


@experiment("promoe:23", also=("24", "25"), most=1)
def bits(lab: Lab) -> Finding:
    """By bits per weight

    From 16 to 4 bits at the same cache rate ProMoE stays 2.049x (1.21x) before LRU and 1.29x (1.742x) before static
    in prefill (decode) of DS-1, stable over bits; in transformers prefetching is hidden completely as bits fall.
    """
    machine, schedules = Hardware.read(HARDWARE), lab.schedules()
    found = {}
    for num in BITS:
        link = replace(machine.link, nbytes_per_s=machine.link.nbytes_per_s * 16 / num)
        runs = lab.runs_of(schedules, replace(machine, link=link))
        found[num] = runs.rows(SYSTEMS, "50%")
    columns = {"bits": "", **{f"{name}, TPOT": "ms" for name in SYSTEMS}, "ProMoE of LRU": "x", "ProMoE waits": "share"}
    cells: list[tuple[Cell, ...]] = []
    for num, rows in found.items():
        ratio, waits = rows["lru"].tpot_s / rows["promoe"].tpot_s, rows["promoe"].waiting(True)
        cells.append((num, *(row.tpot_s for row in rows.values()), ratio, waits))
    ours = {num: rows["promoe"] for num, rows in found.items()}
    checks = [check for num, rows in found.items() for check in fastest(rows, f", {num} bits")]
    checks.append(WAITING.monotonic("with fewer bits ProMoE waits less", ours, rises=False))
    notes = [
        "bytes to load are scaled by the bits, by a link as many times faster; computing stays as it is, as the paper "
        "says of it; what unpacking takes is not counted"
    ]
    return lab.finding(lab.setting(runs, "50%"), [FindingTable.of("By bits a weight", columns, cells)], checks, notes)
