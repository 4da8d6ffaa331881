"""MoE-Infinity: figures 2 to 4 and 7 to 9, tables 1 to 3 and section B.1, in the simulator but for B.1."""

from __future__ import annotations

import os
import platform
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from random import Random

import numpy as np
import numpy.typing as npt

from expertly.core.errors import ConfigError
from expertly.core.geometry import Geometry, LayerGeometry
from expertly.lab.papers import findings as rules
from expertly.lab.papers.findings import TAKEN, Cell, Check, Finding, FindingTable, Paper, show
from expertly.lab.papers.measured import Estimate, Floats, redrawn
from expertly.lab.papers.metrics import HITS, RIGHT, TPOT, WAITING, Metric, grid, of_categories, of_time, table_of
from expertly.lab.papers.recorded import SWITCH
from expertly.lab.papers.runs import CannotRun, Lab, Runs
from expertly.lab.trace_analysis import entropy
from expertly.policies.learned import ModelShape
from expertly.policies.predictor.eam.matrices import Collection, Match
from expertly.sim.schedule import Schedule
from expertly.sim.workload import RowRange
from expertly.trace.reader import TraceRequest
from expertly.trace.schema import NO_EXPERT, max_experts

PAPER = Paper(
    "moe-infinity", "MoE-Infinity: Efficient MoE Inference on Personal Machines with Sparsity-Aware Expert Cache"
)

HARDWARE = "a5000"
Ints = npt.NDArray[np.int64]

# -- 2: few experts a request, all of them over many ---------------------------------------------------------------

UNIFORM = 0.95
"""Of the most entropy there can be: what counts as uniform."""
MOST_REQUESTS = 600


def _counts(lab: Lab) -> tuple[Floats, list[str | None]]:
    """[requests, L, E], of decode; in the seed's order; and their categories."""
    trace, layers = lab.trace, lab.trace.manifest.layers
    requests = [one for one in trace.requests if one.num_rows]
    order = np.random.default_rng(lab.options.seed).permutation(len(requests))[
        : MOST_REQUESTS // (5 if lab.options.quick else 1)
    ]
    found, categories = [], []
    for number in order.tolist():
        first, stop = requests[number].first_row, requests[number].first_row + requests[number].num_rows
        experts = trace.rows("experts", first, stop)[~trace.rows("is_prefill", first, stop)]
        counts = np.zeros((len(layers), max_experts(layers)))
        for layer in range(len(layers)):
            chosen = experts[:, layer][experts[:, layer] != NO_EXPERT]
            counts[layer] = np.bincount(chosen, minlength=counts.shape[1])
        if counts.any():
            found.append(counts)
            categories.append(requests[number].category)
    return np.stack(found), categories


@PAPER.experiment("2", most=4)
def skew(lab: Lab) -> Finding:
    """Use of experts by one request, and by many

    In two sample requests a few experts of the last layer are used much more than the others; over 1000 merged use
    is uniform (Mixtral-8x7B and DeepSeek-V2-Lite).
    """
    counts, categories = lab.once(("counts",), lambda: _counts(lab))
    bits, num = np.log2(lab.num_experts), -(-lab.num_experts // 4)

    def use(of: Floats) -> tuple[Floats, Floats]:
        """[..., L, E] -> [..., L]: what the most used quarter serves; entropy, of the most there can be."""
        most = np.sort(of, axis=-1)[..., ::-1][..., :num].sum(-1)
        return most / np.maximum(of.sum(-1), 1), entropy(of) / bits

    each, merged = use(counts), use(counts.sum(axis=0))
    drawn = [use(np.tensordot(weights, counts, 1)) for weights in redrawn(len(counts))]
    rows = {}
    for where, chosen in {"last layer": slice(-1, None), "all layers": slice(None)}.items():
        rows[f"one request, {where}"] = [Estimate.mean(one[:, chosen].mean(axis=1)) for one in each]
        rows[f"all merged, {where}"] = [
            Estimate.around(float(one[chosen].mean()), np.array([draw[which][chosen].mean() for draw in drawn]))
            for which, one in enumerate(merged)
        ]
    one, together = rows["one request, all layers"], rows["all merged, all layers"]
    ((most, _),) = Counter(categories).most_common(1)
    of_most = use(counts[[category == most for category in categories]].sum(axis=0))
    tried = (
        "they are of one category, so that more kinds could not be tried"
        if len(set(categories)) == 1
        else f"tried with the most frequent of their {len(set(categories))} categories alone, the quarter serves "
        f"{show(float(of_most[0].mean()), 'share')} and the entropy is {show(float(of_most[1].mean()), 'share')}"
    )
    checks = [
        rules.above(
            "a request uses few experts much more than the rest, many merged do less so",
            {"quarter of a request": one[0], "quarter of all merged": together[0]},
            f"what these {len(counts)} requests use together is nearly what each uses; {tried}",
            unit="share",
            by=0.05,
            paper="a few experts against evenly (a figure without numbers)",
        ),
        rules.within(
            "merged over many requests use is uniform",
            "entropy of all merged",
            together[1],
            UNIFORM,
            1.0,
            f"what they use stays popular when merged: the most used quarter still serves "
            f"{show(together[0], 'share')}; {tried}",
            unit="share",
        ),
    ]
    columns = {"": "", "the most used quarter serves": "share", "entropy, of the most there can be": "share"}
    table = FindingTable.of("Use of experts", columns, [(name, *values) for name, values in rows.items()])
    setting = f"decode of {len(counts)} requests, {counts[:, 0].sum() / lab.top_k:.0f} tokens"
    return lab.finding(setting, [table], checks)


# -- 4, table 2: groups of requests, and what follows what ---------------------------------------------------------

SPARSE = 0.12
GROUPS = (10, 30)
"""As table 2 has it; and of the requests, in the largest group:"""
LARGEST = (0.06, 0.48)
ROUNDS, STARTS = 25, 4


@PAPER.experiment("4", "3", "table-2")
def groups(lab: Lab) -> Finding:
    """Groups of requests and transitions between them

    K-means finds 10 to 30 groups of activation matrices in 1000 requests, the largest with 0.06 to 0.48 of them
    (table 2), so that one matrix can stand for the others of its group; P(next group | group) is below 0.12 in most
    cases (figure 4).
    """
    counts, _ = lab.once(("counts",), lambda: _counts(lab))
    total = counts.sum(axis=2, keepdims=True)
    points = np.divide(counts, total, out=np.zeros_like(counts), where=total > 0)
    most = min(40, len(points) // 3)
    numbers = sorted({num for num in (1, 2, 3, 5, 8, 12, 16, 20, 25, 30, 35) if num < most} | {most})

    def elbows(part: int) -> list[int]:
        """With each seed, of so many requests."""
        found = []
        for seed in lab.seeds:
            chosen = np.random.default_rng(seed).permutation(points)[:part].reshape(part, -1)
            found.append(elbow({num: grouped(chosen, num, seed)[1] for num in numbers if num <= part}))
        return found

    found, fewer = elbows(-(-len(points) * 2 // 3)), elbows(-(-len(points) // 3))
    num = round(float(np.median(found)))
    flat = points.reshape(len(points), -1)
    members = grouped(flat, num, lab.options.seed)[0]
    matrix = transitions(members, num)
    sizes = np.bincount(members, minlength=num)
    largest = Estimate.mean((members == sizes.argmax()).astype(np.float64))
    sparse = float((matrix[matrix.sum(axis=1) > 0] < SPARSE).mean())
    near = nearness(flat, num, lab.options.seed), nearness(apart(points, lab.options.seed), num, lab.options.seed)
    rows: list[tuple[Cell, ...]] = [
        ("requests", len(points), None),
        ("groups at the elbow", Estimate.of_seeds(found), None),
        ("the largest group", None, largest),
        ("squared distance to another of the group, of that to any", None, near[0]),
        ("the same, each layer's rows shuffled among requests", None, near[1]),
        (f"transitions below {SPARSE}, in an order made up", None, sparse),
    ]
    notes = [
        "K-means of each request's activation matrix of decode, rows divided by their sums; the elbow is the number of "
        "groups farthest below the line from the first to the last, of two thirds of the requests, with each seed",
        "no check of transitions: the order of these requests is made up, so that nothing could follow from it",
    ]
    requests = f"{len(points)} requests of {of_categories(lab)} (tried with half as many: {np.mean(fewer):.0f} groups)"
    checks = grouping(Estimate.of_seeds(found), largest, *near, requests)
    table = FindingTable.of("Groups", {"": "", "number": "number", "share": "share"}, rows)
    return lab.finding(f"{len(points)} requests", [table], checks, notes)


def grouping(num: float, largest: float, near: float, near_if_shuffled: float, requests: str) -> list[Check]:
    """Requests form groups: more so than if their layers had nothing to do with each other."""
    return [
        rules.below(
            "requests form groups: one stands for the others of its group better than if layers were unrelated",
            {"within groups": near, "layers shuffled": near_if_shuffled},
            f"{requests}: layers of a request say little of each other",
            unit="share",
            slack=-0.05,
            paper="groups at all: no distances are printed",
        ),
        rules.within(
            "as many groups as the paper finds",
            "groups",
            num,
            *GROUPS,
            f"{requests} have an elbow elsewhere",
            paper="10 to 30",
        ),
        rules.within(
            "and as large ones: the largest holds what the paper's largest do",
            "largest group",
            largest,
            *LARGEST,
            f"{requests}, {float(num):.0f} groups: an even share is {1 / num:.2f}",
            unit="share",
            paper="6 to 48 %",
        ),
    ]


def apart(points: Floats, seed: int) -> Floats:
    """[N, D]: each layer's rows of [N, L, E] shuffled among the requests, so that there are no groups."""
    dice = np.random.default_rng(seed)
    mixed = np.stack([points[dice.permutation(len(points)), layer] for layer in range(points.shape[1])], axis=1)
    return mixed.reshape(len(points), -1)


def nearness(points: Floats, num: int, seed: int) -> Estimate:
    """Of points [N, D] in so many groups: the squared distance to the mean of the others in the group (what one of a
    group says of another), in units of that to the mean of all others.
    """
    members = grouped(points, num, seed)[0]
    sizes = np.bincount(members, minlength=num).astype(np.float64)
    means = np.stack([points[members == group].sum(axis=0) for group in range(num)])
    alone = sizes[members] < 2
    every = points.sum(axis=0)
    own = (means[members] - points) / np.maximum(sizes[members] - 1, 1)[:, None]
    others = (every - points) / max(1, len(points) - 1)
    own[alone] = others[alone]
    return Estimate.mean(((points - own) ** 2).sum(axis=1), ((points - others) ** 2).sum(axis=1))


def grouped(points: Floats, num: int, seed: int) -> tuple[Ints, float]:
    """K-means: the group of each of `points` [N, D], and the sum of squared distances to the groups' means: the best of
    several starts, each by k-means++.
    """
    dice = np.random.default_rng(seed)
    return min((_grouped(points, num, dice) for _ in range(STARTS)), key=lambda found: found[1])


def _grouped(points: Floats, num: int, dice: np.random.Generator) -> tuple[Ints, float]:
    centres = points[[dice.integers(len(points))]]  # a copy: it will be moved
    while len(centres) < num:
        far = _distances(points, centres).min(axis=1)
        total = far.sum()
        at = dice.choice(len(points), p=far / total) if total > 0 else dice.integers(len(points))
        centres = np.concatenate([centres, points[at][None]])
    members = np.full(len(points), -1, np.int64)
    for _ in range(ROUNDS):
        nearest = _distances(points, centres).argmin(axis=1)
        if (nearest == members).all():
            break
        members = nearest
        for group in range(num):
            if (members == group).any():
                centres[group] = points[members == group].mean(axis=0)
    return members, float(_distances(points, centres).min(axis=1).sum())


def _distances(points: Floats, centres: Floats) -> Floats:
    squares = (points**2).sum(1)[:, None] + (centres**2).sum(1)[None] - 2 * points @ centres.T
    found: Floats = np.maximum(squares, 0)
    return found


def elbow(spread: Mapping[int, float]) -> int:
    """The number of groups whose spread lies farthest below the line from the first number's to the last's."""
    nums, values = np.array(list(spread), np.float64), np.array(list(spread.values()))
    across = (nums - nums[0]) / max(nums[-1] - nums[0], 1)
    down = (values - values[-1]) / max(values[0] - values[-1], 1e-12)
    return int(nums[np.argmax(1 - across - down)])


def transitions(members: Ints, num: int) -> Floats:
    """[groups, groups]: how often the second follows the first, of all that follows the first."""
    counts = np.zeros((num, num))
    np.add.at(counts, (members[:-1], members[1:]), 1)
    total = counts.sum(axis=1, keepdims=True)
    return np.divide(counts, total, out=np.zeros_like(counts), where=total > 0)


# -- 7 to 9, table 1: time per token beside others, by context and by capacity ---------------------------------------

OUTPUT = 32
SYSTEMS = ("moe-infinity", "brainstorm", "mixtral-offloading", "deepspeed-index")
CONTEXTS = {"up to 2^15": "12%", "2^16": "7%", "2^17": "3.5%"}
"""Share of DeepSeek-V2-Lite's experts (29 GB) that the paper's buffers of more than 3, of 2 and of 1 GB are."""
INDEXED = "deepspeed-index"
LONG = ("moe-infinity", "mixtral-offloading", INDEXED)
CAPACITIES = (1, 20, 40, 60, 80, 100, 120)
P90 = Metric("p90", "ms", lambda row: row.tail_s(90))
P99 = Metric("p99", "ms", lambda row: row.tail_s(99))
LEAST_FOR_P99 = 1000
"""Passes of decode: of fewer a hundredth is a handful."""


def _short(lab: Lab) -> Runs:
    """Answers of 32 tokens."""
    return lab.once(("short answers",), lambda: lab.runs_of(lab.schedules(answer=OUTPUT), HARDWARE))


@PAPER.experiment("7", "table-1", takes=TAKEN, most=3)
def mean_and_tail(lab: Lab) -> Finding:
    """Mean and tail TPOT, 32 tokens out

    DeepSeek-V2-Lite on an A5000, mean (tail): MoE-Infinity 155 (169) ms, vLLM 485 (493), DeepSpeed 737 (803),
    Mixtral-Offloading 1250 (1530), Ollama 2590 (2599); for Mixtral-8x7B 836 ms, 1.4x faster than BrainStorm and
    Mixtral-Offloading.
    """
    runs = _short(lab)
    tables, checks = [], []
    for memory in dict.fromkeys(map(lab.memory, ("25%", "70%"))):
        rows = runs.rows(SYSTEMS, memory)
        num = min(int(row.is_decode.sum()) for row in rows.values())
        tail = P99 if num >= LEAST_FOR_P99 else P90
        tables.append(table_of(f"{memory} of the experts", rows | runs.beside(memory), TPOT, tail, WAITING, HITS))
        for what, metric in {"mean": TPOT, f"tail ({tail.header}, {num} tokens)": tail}.items():
            claim = f"MoE-Infinity has the lowest {what} TPOT, {memory}"
            checks.append(metric.best(claim, rows, "moe-infinity", paper="4.8x and 8.1x faster than the last two (7)"))
    notes = [f"answers of {OUTPUT} tokens; prompts as long as the trace has them (the paper: 512)"]
    notes.append("vLLM and llama.cpp (Ollama), also in the paper's figure, are other programs and not simulated")
    return lab.finding(lab.setting(runs, ""), tables, checks, notes)


@PAPER.experiment("8", takes=("system", "hardware"), most=3)
def context(lab: Lab) -> Finding:
    """TPOT while the context takes the experts' memory

    From 2^12 to 2^17 tokens of context the buffer for experts shrinks from above 3 GB (to 2^15) to 2 and 1 GB;
    MoE-Infinity then gets slower (by 137 ms), less than vLLM and Mixtral-Offloading; DeepSpeed is slow and stable.
    """
    runs = _short(lab)
    found = {f"{label} ({memory})": runs.rows(LONG, memory) for label, memory in CONTEXTS.items()}
    first, *_, last = found.values()
    growth = {name: last[name].tpot_s / first[name].tpot_s for name in LONG}

    def hits_fall(name: str) -> str:
        return f"from {first[name].hit_rate:.1%} to {last[name].hit_rate:.1%}"

    def why_it_grows() -> str:
        system = f"{INDEXED}:scope=layer"
        most, *_, least = (runs.row(system, memory) for memory in CONTEXTS.values())
        return (
            f"it keeps what was used last, too, in a cache over all layers: its hits fall {hits_fall(INDEXED)}, "
            f"MoE-Infinity's {hits_fall('moe-infinity')}; tried with a cache for each layer, from "
            f"{most.hit_rate:.1%} to {least.hit_rate:.1%}, and it grows {show(least.tpot_s / most.tpot_s, 'x')}"
        )

    checks = [
        TPOT.monotonic(
            "MoE-Infinity gets slower as the cache of keys and values takes the experts' memory",
            {label: rows["moe-infinity"] for label, rows in found.items()},
            rises=True,
        ),
        TPOT.everywhere("and stays the fastest", found, "moe-infinity"),
        rules.below(
            "DeepSpeed, which loads by index, grows less",
            {INDEXED: growth[INDEXED], "moe-infinity": growth["moe-infinity"]},
            why_it_grows,
            unit="x",
            paper="stable, where MoE-Infinity takes 137 ms more",
        ),
    ]
    notes = [
        "the budgets are the paper's buffers as shares of DeepSeek-V2-Lite's experts; that attention takes longer with "
        "the context is not simulated"
    ]
    shown = {label: rows | runs.beside(CONTEXTS[label.partition(" (")[0]]) for label, rows in found.items()}
    return lab.finding(
        lab.setting(runs, ""), [grid("TPOT by context", shown, TPOT, "context (experts)")], checks, notes
    )


@PAPER.experiment("9", takes=("hardware", "memory"), most=1, stand_in=SWITCH)
def capacity(lab: Lab) -> Finding:
    """Latency by capacity of the collection

    Latency falls from capacity 1 to 120, where all models have their lowest (NLLB, Switch, Mixtral).
    """
    runs = lab.runs(HARDWARE)
    found = {num: runs.row(f"moe-infinity:capacity={num}") for num in CAPACITIES}
    rows = {str(num): row for num, row in found.items()}
    checks = [
        TPOT.better("120 matrices are faster than 1", rows, "120", "1"),
        TPOT.best("at 120 latency is lowest, to 1 %", rows, "120", slack=0.01),
    ]
    table = table_of("By capacity of the collection", found, TPOT, HITS, RIGHT, key="matrices")
    return lab.finding(lab.setting(runs), [table], checks)


# -- table 3: how many requests a change of workload costs -----------------------------------------------------------

WINDOW = 3
"""Requests over whose hit rates the mean is taken."""
POINTS = 0.02
CHANGED = ("moe-infinity", "brainstorm", "lru", "fmoe", "expertly")
"""The paper's two, then what else is to be known of: a cache alone, maps, ours."""
MOST_ROWS = 60
"""Of a request."""


def requests_back(misses: Sequence[float]) -> int | None:
    """Requests served before the hit rate is back for good, given what each request misses; None: it never was."""
    means = [float(np.mean(misses[i : i + WINDOW])) for i in range(len(misses) - WINDOW + 1)]
    behind = [i for i, mean in enumerate(means) if mean > POINTS]
    if not behind:
        return 0
    return None if behind[-1] == len(means) - 1 else behind[-1] + 1


def is_back(misses: Sequence[Sequence[float]], why: str) -> Check:
    """Given what each request misses, by draw. What was never lost is not back."""
    values = {
        "the first request misses": Estimate.of_seeds([one[0] for one in misses]),
        "nothing": 0.0,
        f"the last {WINDOW} miss": Estimate.of_seeds([float(np.mean(one[-WINDOW:])) for one in misses]),
        f"{POINTS:.0%}": POINTS,
    }
    first, nothing, last, most = values
    told = [
        rules.compare((first, nothing), values, lowest=False, strict=True),
        rules.compare((last, most), values, lowest=True),
    ]
    claim = "MoE-Infinity's hit rate is back within the requests served"
    rule = f"the first request misses hits, and the last {WINDOW} at most {POINTS:.0%} in the mean"
    paper = "after 6 to 28 requests in the mean, 41 to 49 at most"
    why = why if values[first] > 0 else "nothing is lost"
    return rules.judged(claim, rule, rules.listed(values, "share"), told, "share", why, paper)


@PAPER.experiment("table-3", takes=TAKEN)
def recovery(lab: Lab) -> Finding:
    """Requests until the hit rate recovers from a change of workload

    Requests until latency is low again, least-mean-most: within MMLU 0-14-43 (NLLB), 0-9-49 (Mixtral), 28-43-45
    (Arctic); MMLU to BIGBench 0-6-17, 0-27-42, 2-28-41: about 50 at most within a data set, about 30 in the mean
    between two.
    """
    own = [request for request in lab.trace.requests if request.num_rows]
    counted = Counter(request.category for request in own).most_common(2)
    if len(counted) < 2:
        raise ConfigError("requests of two categories are needed, and this trace has one")
    domains = [[one for one in own if one.category == category] for category, _ in counted]
    fewest = min(map(len, domains))
    before, draws = fewest // 3, len(lab.seeds)
    after = min(8 if lab.options.quick else 20, fewest - before)
    if before < 2 or after <= WINDOW:
        raise ConfigError(f"too few requests of a category ({fewest}); 12 and more are needed")
    before = min(before, 12)
    cells: list[tuple[Cell, ...]] = []
    backs: dict[str, list[int | None]] = {}
    missed: dict[str, list[list[float]]] = {}
    notes = []
    for system in dict.fromkeys((*CHANGED, *lab.options.systems)):
        try:
            missed[system] = [_missed(lab, system, domains, before, after, draw) for draw in range(draws)]
        except CannotRun as error:
            notes.append(str(error))
            continue
        backs[system] = [requests_back(misses) for misses in missed[system]]
        known = [one for one in backs[system] if one is not None]
        mean = Estimate.of_seeds(known) if known else None
        least, most = min(known, default=None), max(known, default=None)
        first_misses = Estimate.of_seeds([one[0] for one in missed[system]])
        cells.append((system, first_misses, least, mean, most, draws - len(known)))
    ours = missed["moe-infinity"]
    columns = {"": "", "the first request misses": "points", "back after, least": "", "mean": "number", "most": ""}
    columns |= {"not back": ""}
    checks = [
        is_back(
            ours,
            "answers differ among themselves by more than the change costs: what a request misses varies by "
            f"{float(np.std(np.concatenate(ours))):.1%} (standard deviation)",
        ),
        rules.above(
            "a change costs hits at first",
            {"the first request misses": Estimate.of_seeds([one[0] for one in ours]), "nothing": 0.0},
            "the other category's matrices serve this one as well as its own: over all requests "
            f"{float(np.mean(np.concatenate(ours))):+.1%} are missed",
            unit="share",
        ),
    ]
    names = " to ".join(str(category) for category, _ in counted)
    setting = f"{lab.machine(HARDWARE).name}; {lab.memory()}; {names}; {before} requests, then {after}, of {MOST_ROWS} "
    setting += f"rows at most; {draws} draws; caches and stores begin empty"
    return lab.finding(setting, [FindingTable.of("Requests until the hit rate is back", columns, cells)], checks, notes)


def _missed(
    lab: Lab, system: str, domains: Sequence[Sequence[TraceRequest]], before: int, after: int, draw: int
) -> list[float]:
    """In hit rate, by each of `after` requests of the second domain that follow `before` of the first, beside the same
    that follow as many of their own.
    """
    first, then = ([*requests] for requests in domains)
    Random(lab.options.seed + draw).shuffle(first)
    Random(lab.options.seed + draw).shuffle(then)
    served = then[before : before + after]
    changed, same = (_hits(lab, system, [*past[:before], *served])[before:] for past in (first, then))
    return [b - a for a, b in zip(changed, same, strict=True) if a is not None and b is not None]


def _hits(lab: Lab, system: str, requests: Sequence[TraceRequest]) -> list[float | None]:
    """The hit rate of each request's decode."""
    spans = [RowRange(one.number, one.first_row, min(one.num_rows, MOST_ROWS)) for one in requests]
    found: list[float | None] = lab.runs_of([Schedule([], spans)], HARDWARE).row(system)["hit_rate_by_request"]
    return found


# -- B.1: what finding the nearest activation matrix costs, on this machine's clock ----------------------------------

LAYERS, EXPERTS, TOP_K = 26, 64, 6
WARM_UP, QUERIED = 8, 48
"""Tokens; of the first nothing is measured."""
BOUNDS_S = {1000: 21e-6, 10000: 226e-6}
"""As the paper measured."""
TOKEN_S = 0.120
"""Of a token, of which the paper's query takes less than 1 %."""


def _choices(dice: np.random.Generator, num_rows: int) -> Ints:
    """[T, L, K], some experts more often than others."""
    likely = np.exp(1.5 * dice.standard_normal((LAYERS, EXPERTS)))
    noise = dice.gumbel(size=(num_rows, LAYERS, EXPERTS))
    chosen: Ints = np.argsort(-(np.log(likely) + noise), axis=-1)[..., :TOP_K]
    return chosen


def _query_s(capacity: int, dice: np.random.Generator) -> Estimate:
    """Median seconds of one layer, with a full collection of requests of 20 tokens."""
    sizes = Geometry(tuple(LayerGeometry(EXPERTS, TOP_K, 64, 64, 3, 2) for _ in range(LAYERS)))
    collection = Collection(ModelShape.of(sizes), capacity)
    places = np.arange(LAYERS)[:, None] * EXPERTS
    for _ in range(capacity):
        counts = np.bincount((_choices(dice, 20) + places).ravel(), minlength=LAYERS * EXPERTS)
        collection.add(counts.reshape(LAYERS, EXPERTS))
    times = []
    for token in range(WARM_UP + QUERIED):
        match = Match(collection)
        for layer, experts in enumerate(_choices(dice, 1)[0].tolist()):
            start = time.perf_counter_ns()
            match.observe(layer, dict.fromkeys(experts, 1))
            match.nearest(1)
            if token >= WARM_UP:
                times.append(time.perf_counter_ns() - start)
    return Estimate.percentile(np.array(times) / 1e9, 50, np.repeat(np.arange(QUERIED), LAYERS))


@PAPER.experiment("B.1", most=1, is_timed=True)
def query(lab: Lab) -> Finding:
    """What a query costs

    21 us a query of 1K matrices, 226 us of 10K, at most one a layer: less than 1 % of the latency, typically above
    120 ms a token.
    """
    capacities = (120, 1000) if lab.options.quick else (120, 1000, 10000)
    found = {num: _query_s(num, np.random.default_rng(lab.options.seed)) for num in capacities}
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    checks = [
        rules.below(
            f"a query of {num} matrices takes no longer than the paper's",
            {"here": found[num], "the paper": bound},
            f"measured on {machine}",
            unit="us",
            paper=show(bound, "us"),
        )
        for num, bound in BOUNDS_S.items()
        if num in found
    ]
    checks.append(
        rules.below(
            "all queries of a token take less than 1 % of it",
            {f"{LAYERS} layers": max(found.values()) * LAYERS, f"1% of {show(TOKEN_S, 'ms')}": TOKEN_S / 100},
            "the paper queries at most once a layer, and counts one query; here all layers of a token are counted",
            unit="ms",
        )
    )
    columns = {"matrices": "", "here": "us", "paper": "us"}
    rows = [(num, spent, BOUNDS_S.get(num)) for num, spent in found.items()]
    table = FindingTable.of("One layer's increment and the nearest matrix", columns, rows)
    setting = f"no trace: {LAYERS} layers, {EXPERTS} experts, top-{TOP_K}; medians"
    return Finding("made up", setting, (table,), tuple(checks), measured_on=machine)


# -- 4.6, 4.7: what is prefetched and what goes ----------------------------------------------------------------------

SETTINGS = {"matches": (1, 2, 4, 8, 16), "distance": (1, 2, 3, 4), "width": (1, 2, 3, 4, 6)}
NEAR = 0.02
FAR = (2, 4)
"""Layers ahead: of one alone, as the preset looks, none is nearer than another."""


@PAPER.experiment("4.7", takes=TAKEN)
def eviction(lab: Lab) -> Finding:
    """Eviction: algorithm 1 beside LRU and LFU

    The cache evicts by the predicted activation matrix and the layer (algorithm 1); LRU and LFU, which know
    neither, hit less.
    """
    runs = lab.runs(HARDWARE)
    rows = runs.rows({"its own": "moe-infinity"} | {name: f"moe-infinity:eviction={name}" for name in ("lru", "lfu")})
    checks = [
        HITS.best("algorithm 1 hits more than LRU and LFU", rows, "its own"),
        TPOT.best("and is faster", rows, "its own"),
    ]
    table = table_of("The same prediction, what goes varied", rows | runs.beside(), HITS, TPOT, key="what goes")
    return lab.finding(lab.setting(runs), [table], checks)


@PAPER.experiment("4.6", takes=("hardware", "memory"), most=1)
def settings(lab: Lab) -> Finding:
    """How much to prefetch, which the paper leaves open, and layer proximity

    The next layers' experts first, by the layer proximity 1 - (i - l) / L (section 4.5); how many of a layer, how far
    ahead and how many matrices are summed is open.
    """
    runs = lab.runs(HARDWARE)
    base = runs.row("moe-infinity")
    tables, cases, better = [], {}, []
    for key, values in SETTINGS.items():
        rows = {str(value): runs.row(f"moe-infinity:{key}={value}") for value in values}
        tables.append(table_of(f"By {key}", rows, HITS, RIGHT, TPOT, key=key))
        best = min(rows.values(), key=lambda row: row.tpot_s)
        times = {"preset": base.tpot_s, f"{key}={best.system.partition('=')[2]}": best.tpot_s}
        cases[key] = rules.compare(tuple(times), times, lowest=True, slack=NEAR)  # type: ignore[arg-type]
        better += [of_time(base, best)] * (base.tpot_s > best.tpot_s * (1 + NEAR))
    claim = "the preset is near the best of each setting"
    rule = f"TPOT within {NEAR:.0%} of the lowest"
    check = rules.everywhere(claim, cases, rule, lambda: "; ".join(better), unit="ms")
    ways = {d: {name: f"moe-infinity:distance={d}:proximity={name}" for name in ("yes", "no")} for d in FAR}
    found = {d: runs.rows(names) for d, names in ways.items()}
    tables += [table_of(f"By proximity, {d} layers ahead", rows, HITS, RIGHT, TPOT) for d, rows in found.items()]
    nearer = [
        TPOT.better(f"layer proximity makes it faster, {d} layers ahead", rows, "yes", "no", paper="no numbers")
        for d, rows in found.items()
    ]
    return lab.finding(lab.setting(runs), tables, [check, *nearer])
