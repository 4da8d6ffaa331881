"""ProMoE: figures 3 to 5, 8, 9 and 11 to 25, in the simulator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from expertly.core.geometry import Geometry
from expertly.lab.accuracy import accuracies, is_below, means
from expertly.lab.dataset import Dataset
from expertly.lab.papers import findings as rules
from expertly.lab.papers.findings import NEGLIGIBLE, TAKEN, Cell, Check, Finding, FindingTable, OfPair, Paper, Why, show
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
from expertly.lab.papers.recorded import SWITCH
from expertly.lab.papers.runs import FASTER_LINK, Lab, Row, Runs, batched, experts_needed, with_link
from expertly.lab.train import STOPPING, TrainOptions, train
from expertly.policies.predictor.learned import LearnedWeights
from expertly.scheduler.counters import PhaseCounters
from expertly.scheduler.presets import get_system
from expertly.sim.compute import compute_model
from expertly.sim.hardware import Hardware
from expertly.sim.study import Memory
from expertly.sim.training import popularity
from expertly.sim.workload import RowRange, TraceWorkload

PAPER = Paper("promoe", "ProMoE: Fast MoE-based LLM Serving using Proactive Caching")

Ints = npt.NDArray[np.int64]

HARDWARE = "rtx4090"
LRU = "lru:order=id:preemption=late"
SYSTEMS = {"static": "static:order=id:preemption=late", "lru": LRU, "promoe": "promoe"}
RATES = ("10%", "25%", "50%", "75%")
BLOCKED = Metric("of it blocked", "share", lambda row: row.waiting(False))

# -- the two codebases, and what they do without ProMoE ---------------------------------------------------------------

CODEBASES = ("transformers", "llama.cpp")
OVERHEADS: dict[str, Any] = {"launch_ns": 5_000, "layer_ns": 60_000, "iteration_ns": 200_000}
"""Of llama.cpp, assumed: some twenty kernels a layer, launched from C++ in 2 to 3 us each; of transformers, the profile
has what Python takes.
"""
PAGE, FAULT_NS = 2 << 20, 20_000
"""Of unified memory: a driver moves 2 MiB at a time and takes some 20 us for each (assumed; with both it reaches about
half of a PCIe link, as NVIDIA reports of faulting kernels).
"""
PROCESSOR: dict[str, Any] = {
    "memory_nbytes_per_s": 89.6e9,
    "flops_per_s": 1.5e12,
    "launch_ns": 5_000,
    "layer_ns": 60_000,
}
"""An i9-14900K: two channels of DDR5-5600 (Intel's data sheet), its operations assumed."""


def on(lab: Lab, codebase: str) -> Hardware:
    """The paper's machine."""
    machine = lab.machine(HARDWARE)
    return machine if codebase == CODEBASES[0] else replace(machine, name=f"{machine.name}, {codebase}", **OVERHEADS)


def runs_on(lab: Lab, codebase: str) -> Runs:
    return lab.once(("on", codebase), lambda: lab.runs_of(lab.schedules(), on(lab, codebase)))


def unified_memory(lab: Lab, codebase: str) -> Runs:
    """UM: one LRU cache whose link moves whole pages, when they are touched. Matrices begin and end within pages."""

    def make() -> Runs:
        machine, layer = on(lab, codebase), lab.subject.layers[0]
        num_pages = layer.expert_nbytes / PAGE + layer.num_matrices
        link = replace(
            machine.link,
            nbytes_per_s=machine.link.nbytes_per_s * layer.expert_nbytes / (num_pages * PAGE),
            overhead_ns=round(num_pages * FAULT_NS),
        )
        return lab.runs_of(lab.schedules(), replace(machine, name=f"{machine.name}, pages", link=link))

    return lab.once(("pages", codebase), make)


def whole_layers(
    lab: Lab, codebase: str, memory: str, processor: Mapping[str, Any] = PROCESSOR, link: float = 1.0
) -> Row:
    """Whole layers stay, as many as the memory is of all experts. Of the others TO (transformers) moves what a pass
    needs, attention too, and waits; LO (llama.cpp) computes all of them on the processor. Nothing is to be decided, so
    that times are sums over what each pass needs. `link`: times as fast as the machine's.
    """
    runs, machine = runs_on(lab, codebase), with_link(on(lab, codebase), link)
    geometry, dense = Geometry(lab.subject.layers), lab.subject.dense
    here = compute_model(machine, geometry, dense)
    there = compute_model(replace(machine, **processor), geometry, dense) if codebase == CODEBASES[1] else here
    num_here = Memory(memory).budget(geometry).memory_nbytes * geometry.num_layers // geometry.nbytes
    dense_ns = machine.link.occupies_ns(dense.layer_nbytes if dense else 0)
    rows = []
    for study, like in zip(runs.studies, runs.row(LRU, memory).by_seed, strict=True):
        passes, waits = [], []
        for one in TraceWorkload(study.trace, study.schedule.test).iterations():
            spent = waited = 0
            for router in one.layers:
                layer = router.layer
                model = here if layer < num_here else there
                spent += model.dense_ns(layer, one.num_tokens)
                spent += sum(model.span_ns(layer, num, 1) for num in router.num_tokens)
                if layer >= num_here and codebase == CODEBASES[0]:
                    experts_ns = len(router.experts) * machine.link.occupies_ns(geometry.layers[layer].expert_nbytes)
                    waited += machine.link.latency_ns + dense_ns + experts_ns
            passes.append(spent + waited + here.head_ns(one.num_tokens))
            waits.append(waited)
        rows.append(
            replace(
                like,
                system=OFFLOADING[codebase],
                passes_s=np.array(passes) / 1e9,
                waiting_s=np.array(waits) / 1e9,
                loading_s=np.array(waits) / 1e9,
            )
        )
    again = partial(whole_layers, lab, codebase, memory, processor, FASTER_LINK)
    return replace(Row.of_seeds(rows), on_faster_link=again)


OFFLOADING = dict(zip(CODEBASES, ("TO: moves layers", "LO: computes layers on the processor"), strict=True))
SLOWER_PROCESSOR = PROCESSOR | {"memory_nbytes_per_s": PROCESSOR["memory_nbytes_per_s"] / 4}


def _of_processor(lab: Lab, memory: str, metric: Metric, other: Row) -> str:
    """Why what is computed there is fast, and whether it is that."""
    slower = whole_layers(lab, CODEBASES[1], memory, SLOWER_PROCESSOR)
    times = show(metric.of(slower) / metric.of(other), "x")
    return (
        "a processor is assumed to read 90 GB/s, of which four fifths are reached: more than the link brings; tried "
        f"with a quarter of that, it takes {times} of {other.name}'s {metric.header}"
    )


UM, UNIFIED = "UM: pages", "lru:scope=global:order=id:preemption=late"


# -- 3 to 5: what an LRU cache leaves to wait for, and how evenly experts are used ----------------------------------

LARGE = 0.5
"""Of decode, blocked at half of the experts: most of it, where the paper has 60.4 and 79.0 %."""


@PAPER.experiment("3", "4", "5", takes=("hardware",), stand_in=SWITCH)
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
    training = runs.study.schedule.training
    cdf = _served(lab, training)
    checks: list[Check | None] = [
        TPOT.monotonic("TPOT falls with the cache rate", found, rises=False),
        mostly_blocked(blocked, partial(_why_little_blocked, lab, half)),
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
    notes = []
    if lab.subject.name == SWITCH:
        notes = [
            "5: no check: Switch is of the older models, which use experts by a power law, and this one is untrained"
        ]
    else:
        category_of: dict[int | None, str | None] = {one.number: one.category for one in lab.trace.requests}
        ((most, _),) = Counter(category_of[span.request] for span in training).most_common(1)
        own = _served(lab, [span for span in training if category_of[span.request] == most])
        why = (
            f"the popular half serves {show(cdf[0.5], 'share')}; tried with the most frequent of "
            f"{of_categories(lab)} alone, the most popular quarter serves {show(own[0.25], 'share')}"
        )
        checks.append(evenly(cdf[0.25], lab.num_experts, why))
    tables = [
        table_of(f"3, 4: `{LRU}`", found, TTFT, BLOCKED, TPOT, WAITING, HITS, key="kept"),
        FindingTable.of("5: access by popularity", {"most popular": "share", "serve": "share"}, [*cdf.items()]),
    ]
    return lab.finding(lab.setting(runs, ""), tables, checks, notes)


def _why_little_blocked(lab: Lab, half: Row) -> str:
    """What a pass computes hides what it waits for."""
    tried = runs_on(lab, CODEBASES[1]).row(LRU, "50%")
    return (
        f"{half.name} computes {show(half.tpot_s * (1 - float(half.waiting(True) or 0)), 'ms')} a pass and hits "
        f"{show(half.hit_rate, 'share')}; tried with the low overheads of {CODEBASES[1]}, "
        f"{show(tried.waiting(True), 'share')} is blocked"
    )


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


def _served(lab: Lab, spans: Sequence[RowRange]) -> dict[float, float]:
    """Of demands, by the most popular part of a layer's experts; the mean over layers."""
    layers = len(lab.subject.layers)
    uses = np.zeros((len(spans), layers, lab.num_experts))
    for number, span in enumerate(spans):
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


@PAPER.experiment("8", "9", takes=("hardware", "memory"), needs=("router_inputs", "lookahead", "weights"), most=1)
def accuracy(lab: Lab) -> Finding:
    """Accuracy of predictors by layer and distance

    Token id 54 % on average; skip prediction 90.5 % at k = 1, 54.5 % at k = 8, then worse than the token id (DS-2);
    the learned predictor stays highest at k = 2, 4, 8, in QW-2's layers 16 and 27, too.
    """
    (schedule, *_) = lab.schedules(len(lab.seeds))  # the networks learned from one part: other seeds test no others
    training, weights = schedule.training, lab.subject.weights[LearnedWeights]
    assert isinstance(weights, LearnedWeights)
    spans = [*training, *schedule.test]
    data = Dataset(lab.trace, spans)
    owner = np.repeat(np.arange(-len(training), len(schedule.test)), [one.num_rows for one in spans])

    def by_request(right: Ints, named: Ints, rows: Ints) -> float:
        return Estimate.mean(*(np.bincount(owner[rows], one, len(schedule.test)) for one in (right, named)))

    found, num_judged = accuracies(lab.trace, data, training, schedule.test, weights, by_request)
    num = sum(span.num_rows for span in training)
    mean = means(found)
    right = {name: {k: row[key] for k, row in mean.items()} for name, key in SHOWN.items()}
    for name, is_plain in (("two layers alone", True), ("with the path past them", False)):  # trained here
        own = trained(lab, data, training, weights, is_plain)
        judged = means(accuracies(lab.trace, data, training, schedule.test, own, by_request)[0])
        right[name] = {k: row["learned"] for k, row in judged.items()}
    skip, learned, token_id, last = right["skip"], right["learned"], right["token id"], max(mean)
    num_layers = len(lab.subject.layers)
    from_first = ", ".join(f"{min(k, num_layers)} at k = {k}" for k in mean)
    others = means([one for one in found if one.layer >= one.distance])
    first_layer = (
        f"layers nearer to the first than k are predicted from it, {from_first} of {num_layers}; tried without them, "
        + ", ".join(f"skip is {show(one['lookahead'], 'share')} right at k = {k}" for k, one in others.items())
    )

    def above_both(claim: str, name: str, why: str) -> Check:
        cases = {}
        for k in (k for k in LEARNED_AT if k in mean):
            other = max(("skip", "token id"), key=lambda one: float(right[one][k]))
            values = {one: right[one][k] for one in (name, other)}
            cases[f"k={k}"] = rules.compare((name, other), values, lowest=False, slack=-NEGLIGIBLE)
        return rules.everywhere(claim, cases, "mean over layers, at k = 2, 4, 8", why, unit="share")

    checks = [
        above_both(
            "the learned predictor is better than both others",
            "learned",
            f"{lab.subject.weights_note}; {num} tokens of it count token ids",
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
            {"skip at the largest k": skip[last], "token id": token_id[last]},
            first_layer,
            unit="share",
            by=-0.02,
            paper="54.5 and 54 %",
        ),
        keeps_accuracy(learned, skip, first_layer),
        above_both(
            "networks of two layers alone, as the paper's, are better than both others",
            "two layers alone",
            f"{num} tokens are few for networks that begin from nothing: what is all but linear they learn late",
        ),
    ]
    runs = lab.runs(HARDWARE)
    good = {name: {k: goodpred(runs, f"promoe{of}:distance={k}", k) for k in mean} for name, of in PREDICTIONS.items()}
    checks += good_prediction(good["learned"], good["skip"])
    crossover = next((k for k in mean if skip[k] < token_id[k]), None)
    notes = [
        f"skip prediction falls below the token id from k = {crossover} on in the mean (the paper: past 8, with 26 "
        f"layers; {num_layers} here), and in {sum(map(is_below, found))} of {len(found)} pairs of layer and distance",
        "a layer nearer to the first than k is predicted from the first, by skip prediction too",
    ]
    below = {"layers skip < token id": {k: row["lookahead_below_token_id"] for k, row in mean.items()}}
    of_pair = {(one.layer, one.distance): one for one in found}
    by_layer = {
        f"{name}, k={k}": {layer: getattr(of_pair.get((layer, k)), key, None) for layer, _ in sorted(of_pair)}
        for k in mean
        for name, key in (("learned", "learned"), ("skip", "lookahead"))
    }
    what = f"GOODPRED: right, of those named, times there before use, of those named; {runs.hardware}, {runs.memory}"
    tables = [
        _columns("Mean over layers: right, of the K named", "k", right | below, dict.fromkeys(below, "")),
        _columns("By layer", "layer", by_layer),
        _columns(what, "k", good),
    ]
    setting = f"{num_judged} decode tokens; token ids counted over {num} tokens; {lab.subject.weights_note}"
    return lab.finding(setting, tables, checks, notes)


def _columns(
    title: str, key: str, columns: Mapping[str, Mapping[int, Cell]], units: Mapping[str, str] | None = None
) -> FindingTable:
    """A line for each key of `columns`; they are shares, but for `units`."""
    lines = [(at, *(one[at] for one in columns.values())) for at in next(iter(columns.values()))]
    return FindingTable.of(title, {key: "", **dict.fromkeys(columns, "share"), **(units or {})}, lines)


SHOWN = {"learned": "learned", "skip": "lookahead", "token id": "token_id"}
PREDICTIONS = {"learned": "", "skip": ":prediction=lookahead"}


def trained(
    lab: Lab, data: Dataset, training: Sequence[RowRange], like: LearnedWeights, is_plain: bool
) -> LearnedWeights:
    """Networks of as many numbers, which learned from the training part."""
    (one, *_) = like.mlps.values()
    num_inputs, num_experts = one.direct.shape[1], len(one.bias)
    hidden = round((one.num_parameters - num_experts) / (num_inputs + num_experts + 1)) if is_plain else len(one.hidden)
    stopping = sum(span.num_rows for span in training[: max(1, len(training) // STOPPING)])
    rows = np.arange(sum(span.num_rows for span in training))
    options = TrainOptions(
        like.distances, hidden, 4 if lab.options.quick else 40, seed=lab.options.seed, plain=is_plain
    )
    return train(data, rows[stopping:], rows[:stopping], options).weights


def goodpred(runs: Runs, system: str, k: int) -> float:
    """Of predictions k layers ahead."""
    return Estimate.of_seeds([row["goodpred_by_distance"][str(k)] for row in runs.row(system).by_seed])


def good_prediction(learned: Mapping[int, float], skip: Mapping[int, float]) -> list[Check]:
    """GOODPRED by distance: what the learned predictor is for."""
    best = max(learned, key=lambda k: float(learned[k]))
    return [
        rules.everywhere(
            "the learned predictor's GOODPRED is higher than skip prediction's, beyond k = 1",
            {
                f"k={k}": rules.compare(("learned", "skip"), {"learned": learned[k], "skip": skip[k]}, lowest=False)
                for k in learned
                if k > 1
            },
            "GOODPRED at the same k, where what is there before use is alike",
            "where both are right as often, both are there as often: it is decided by accuracy, above",
            unit="share",
            paper="higher, as it is more accurate (section 4)",
        ),
        rules.above(
            "and highest where it looks farther ahead than one layer",
            {f"learned, k = {best}": learned[best], "skip, k = 1": skip[1]},
            "what comes sooner is not there more often: the link is busy either way",
            slack=-NEGLIGIBLE,
            unit="share",
            paper="skip prediction is accurate at k = 1, but too late",
        ),
    ]


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


FASTER = {
    "transformers": ("1.52x and 2.32x faster", "1.52x and 1.33x faster"),
    "llama.cpp": ("1.36x and 2.12x faster", "1.49x and 1.09x faster"),
}


@PAPER.experiment("11", "12", takes=TAKEN)
def overall(lab: Lab) -> Finding:
    """Latency beside static and LRU caches, unified memory and whole layers

    Prefill 1.52x and 2.32x faster than static and LRU, decode 1.52x and 1.33x (transformers); 1.36x and 2.12x,
    1.49x and 1.09x (llama.cpp). LRU thrashes in prefill, and is faster than static in decode. Unified memory is always
    slower than LRU, layers that transformers moves (TO) than static; layers that llama.cpp computes on the processor
    (LO) mostly, but not of Mixtral.
    """
    tables, checks, memory = [], [], lab.memory("50%")
    for codebase in CODEBASES:
        runs = runs_on(lab, codebase)
        rows = runs.rows(SYSTEMS, memory)
        others = {
            UM: unified_memory(lab, codebase).row(UNIFIED, memory),
            OFFLOADING[codebase]: whole_layers(lab, codebase, memory),
        }
        every, ours, where = rows | others, rows["promoe"], f", {codebase}"
        checks += [
            *(
                one.best(f"ProMoE has the lowest {one.header}{where}", rows, "promoe", paper=times)
                for one, times in zip((TTFT, TPOT), FASTER[codebase], strict=True)
            ),
            TPOT.better(
                f"LRU is faster than static in decode{where}",
                rows,
                "lru",
                "static",
                f"static hits {rows['static'].hit_rate:.1%}, LRU {rows['lru'].hit_rate:.1%}",
            ),
            TTFT.better(
                f"and slower in prompts, by thrashing{where}",
                rows,
                "static",
                "lru",
                partial(of_prompts, rows["lru"], rows["static"]),
            ),
        ]
        for name, better in ((UM, "lru"), (OFFLOADING[codebase], "static")):
            for metric in (TTFT, TPOT):
                is_there = name == OFFLOADING[CODEBASES[1]]
                why = partial(_of_processor, lab, memory, metric, rows[better]) if is_there else None
                claim = f"{name}: slower than {better} ({metric.header}{where})"
                checks.append(metric.better(claim, every, better, name, why))
        faster, faster_decode = TTFT.times(ours, "of ProMoE's"), TPOT.times(ours, "of ProMoE's, decode")
        tables.append(
            table_of(
                f"{codebase}, {memory} of the experts", every | runs.beside(memory), TTFT, faster, TPOT, faster_decode
            )
        )
    notes = [
        f"{UM}: `{UNIFIED}` over a link that moves {PAGE >> 20} MiB at a time, {FAULT_NS // 1000} us each (assumed)",
        "TO and LO keep whole layers, and their times are sums: nothing is decided. What attention and norms of layers "
        "that do not stay would leave free for experts is not counted",
        f"llama.cpp's overheads are assumed: {', '.join(f'{key} {value}' for key, value in OVERHEADS.items())}",
    ]
    return lab.finding(lab.setting(runs_on(lab, CODEBASES[0]), memory), tables, checks, notes)


TECHNIQUES = {
    "LRU, by id, late": LRU,
    "+ prefetch": "promoe:order=id:preemption=late:segments=1",
    "+ chunked": "promoe:order=id:preemption=late",
    "+ early preemption": "promoe:order=id",
    "+ reordered": "promoe",
}


def _reads(runs: Runs, system: str) -> float | None:
    """What prompts demanded, in units of what was absent when their routers spoke: above 1 something was read twice."""
    parts = get_system(runs.subject.fitted(system)[0])
    found = []
    for study in runs.studies:
        prompts = PhaseCounters()
        simulator = study.simulate(parts, Memory(runs.memory).budget(study.geometry_of(parts)))
        for counters in simulator.scheduler.counters:
            prompts.add(counters.prefill)
        absent = prompts.demanded_nbytes - prompts.hit_nbytes
        if absent:
            found.append((prompts.loaded_nbytes - prompts.prefetched_nbytes) / absent)
    return Estimate.of_seeds(found) if found else None


@PAPER.experiment("13", "14", takes=TAKEN)
def techniques(lab: Lab) -> Finding:
    """Latency as each technique is added

    In prefill prefetching alone brings little or costs, early preemption 1.27x and reordered inference 2.29x; in
    decode each technique brings something, 1.37x in all (transformers; llama.cpp alike).
    """
    tables: list[FindingTable] = []
    checks: list[Check | None] = []
    has_prompts = lab.subject.has_prompts
    for codebase in CODEBASES:
        runs, where = runs_on(lab, codebase), f", {codebase}"
        rows = runs.rows(TECHNIQUES)
        base, whole = rows["LRU, by id, late"], rows["+ reordered"]
        every = rows | runs.beside()
        reads = {row.system: _reads(runs, row.system) if has_prompts else None for row in every.values()}
        read = Metric("read, of absent", "number", lambda row: reads[row.system])  # noqa: B023 - used at once
        faster, faster_decode = TTFT.times(base, "of the first"), TPOT.times(base, "of the first, decode")
        title = f"One technique after the other{where}"
        tables.append(table_of(title, every, TTFT, faster, read, TPOT, faster_decode))
        checks.append(
            TPOT.monotonic(
                f"in decode each technique makes it faster{where}",
                rows,
                OfPair(partial(_why_slower, rows)),
                rises=False,
                slack=0.005,
            )
        )
        in_all = f"all of it takes less time in decode than LRU{where}"
        paper = "1.37x faster" if codebase == CODEBASES[0] else ""
        checks.append(TPOT.better(in_all, rows, "+ reordered", "LRU, by id, late", paper=paper))
        if has_prompts:
            times = [rows[label].ttft_s for label in ("LRU, by id, late", "+ prefetch", "+ chunked", "+ reordered")]
            checks += in_prompts(times, partial(of_prompts, *rows.values()), where)
            checks.append(reads_once(reads[whole.system] or 0.0, partial(of_prompts, whole, base), where))
    return lab.finding(lab.setting(runs_on(lab, CODEBASES[0])), tables, checks)


def _why_slower(rows: Mapping[str, Row], after: str, before: str) -> str:
    return of_time(rows[after], rows[before])


LITTLE = 0.05


def reads_once(read: float, why: Why, where: str = "") -> Check:
    """`read`: bytes, of those of the experts that were absent."""
    values = {"read, of absent": read, f"once and {show(LITTLE, 'share')}": 1 + LITTLE}
    return rules.below(f"reordering ends the thrash: nothing is read twice{where}", values, why, unit="x")


def in_prompts(times: Sequence[float], why: Why, where: str = "") -> list[Check]:
    """Times to the first token, of the first, with prefetching, in chunks, and with all techniques."""
    base, prefetch, chunked, reordered = times
    gains = {"early preemption and reordering": chunked - reordered, "prefetching in chunks": base - chunked}
    return [
        rules.above(
            f"prefetching alone brings a prompt little, or costs{where}",
            {"+ prefetch": prefetch, "LRU": base},
            why,
            slack=LITTLE,
            unit="ms",
            paper="brings little, and can cost",
        ),
        rules.above(
            f"of what all of it brings a prompt, early preemption and reordering bring most{where}",
            gains,
            why,
            unit="ms",
            paper="1.27x with early preemption, 2.29x with both",
        ),
        rules.above(
            f"and with both a prompt is faster by half of what the paper has{where}",
            {"LRU over + reordered": base / reordered, "half of the gain": 1 + HALF * (PAPER_PROMPTS - 1)},
            why,
            unit="x",
            paper=f"{PAPER_PROMPTS}x",
        ),
    ]


PAPER_PROMPTS = 2.29


@PAPER.experiment("15", "16", "17", takes=("system", "hardware"))
def rates(lab: Lab) -> Finding:
    """Latency and waiting by cache rate

    At all cache rates ProMoE is fastest: in prefill 1.72x and 1.75x before LRU, 1.22x and 1.43x before static
    (DS-1, QW-2), in decode 1.58x and 1.34x; loading on the critical path falls to 25.61 and 11.18 % of decode (LRU
    45.52 and 36.31 %). With llama.cpp (figure 17) it is 1.53x and 1.10x before LRU and static in prefill, 1.14x and
    1.27x in decode, where computing on the processor (LO) is faster at low cache rates and slower at high ones.
    """
    tables: list[FindingTable] = []
    checks: list[Check | None] = []
    for codebase, (of_prefill, of_decode) in MEANS.items():
        runs, where = runs_on(lab, codebase), f", {codebase}"
        found = {rate: runs.rows(SYSTEMS, rate) for rate in RATES}
        name = OFFLOADING[codebase]
        shown = {
            rate: rows | {name: whole_layers(lab, codebase, rate)} | runs.beside(rate) for rate, rows in found.items()
        }
        metrics = [TTFT, BLOCKED] * lab.subject.has_prompts + [TPOT, WAITING]
        tables += [grid(f"{one.header}{where}", shown, one, "kept") for one in metrics]
        for one, paper in ((TTFT, of_prefill), (TPOT, of_decode)):
            claim = f"ProMoE has the lowest {one.header} at all cache rates{where}"
            checks.append(one.everywhere(claim, found, "promoe", paper=paper))
        checks.append(WAITING.everywhere(f"and waits least in decode{where}", found, "promoe"))
        if codebase == CODEBASES[1]:
            least, most = shown[RATES[0]], shown[RATES[-1]]
            checks += [
                TPOT.better("17: with little memory LO decodes faster than ProMoE", least, name, "promoe"),
                TPOT.better(
                    "17: and with much memory slower",
                    *(most, "promoe", name, partial(_of_processor, lab, RATES[-1], TPOT, most["promoe"])),
                ),
            ]
    return lab.finding(lab.setting(runs_on(lab, CODEBASES[0]), ""), tables, checks)


MEANS = {
    "transformers": ("1.72x and 1.75x, 1.22x and 1.43x faster in the mean", "1.58x and 1.34x faster in the mean"),
    "llama.cpp": ("1.53x and 1.10x faster in the mean", "1.14x and 1.27x faster in the mean"),
}

# -- 18 to 25: several requests at once, and fewer bits a weight -----------------------------------------------------

SIZES = (1, 2, 4)
BITS = (16, 8, 4)


BATCHED = {
    "transformers": ("2.26x and 1.57x faster", "1.56x and 1.59x faster"),
    "llama.cpp": ("2.19x and 1.19x faster", "1.22x and 1.59x faster"),
}


@PAPER.experiment("18", "19", "20", "21", "22", takes=TAKEN, most=1)
def batches(lab: Lab) -> Finding:
    """Throughput and latency by batch size

    Prefill throughput grows linearly with the batch, decode's hardly: experts used grow with it. ProMoE is 2.19x
    and 1.19x before LRU and static in prefill, 1.22x and 1.59x in decode (llama.cpp, 18 to 20); 2.26x and 1.57x, 1.56x
    and 1.59x (transformers, 21 and 22); over LRU the gain grows from 1.16x to 1.34x from batch 1 to 4.
    """
    tables: list[FindingTable] = []
    checks: list[Check | None] = []
    has_prompts, memory = lab.subject.has_prompts, lab.memory("50%")
    for codebase, (of_prefill, of_decode) in BATCHED.items():
        machine, where = on(lab, codebase), f", {codebase}"
        runs = {size: batched(lab, machine, size) for size in SIZES}
        found = {size: one.rows(SYSTEMS, memory) for size, one in runs.items()}
        shown = {size: rows | runs[size].beside(memory) for size, rows in found.items()}
        gain = {size: rows["lru"].tpot_s / rows["promoe"].tpot_s for size, rows in found.items()}
        columns = {"batch": "", **{f"{name}, decode": "number" for name in shown[1]}, "ProMoE of LRU": "x"}
        cells: list[tuple[Cell, ...]] = [
            (size, *(size / row.tpot_s for row in rows.values()), gain[size]) for size, rows in shown.items()
        ]
        title = f"Tokens a second of decode, about: batch over the time of a pass{where}"
        tables.append(FindingTable.of(title, columns, cells))
        one, four = (found[size]["promoe"] for size in (1, 4))
        by_size = {f"batch {size}": rows for size, rows in found.items()}
        if has_prompts:
            tables.append(grid(f"Time of a batch's prompts{where}", shown, TTFT, "batch"))
            checks += [
                rules.below(
                    f"four prompts together take much less than four times one{where}",
                    {"4 together, of one": four.ttft_s / one.ttft_s, "twice": 2.0},
                    partial(_why_prompts_add_up, lab, machine),
                    unit="x",
                    paper="throughput grows linearly with the batch: about once",
                ),
                TTFT.everywhere(f"ProMoE has the lowest TTFT at all sizes{where}", by_size, "promoe", paper=of_prefill),
            ]
        checks += [
            TPOT.everywhere(f"ProMoE has the lowest TPOT at all sizes{where}", by_size, "promoe", paper=of_decode),
            rules.monotonic(
                f"the gain over LRU grows with the batch{where}",
                {str(size): value for size, value in gain.items()},
                partial(of_time, four, found[4]["lru"]),
                rises=True,
                unit="x",
                slack=0.02,
                paper="from 1.16x to 1.34x",
            ),
            rules.above(
                f"throughput of decode hardly grows: a pass of four takes most of four times as long{where}",
                {"4 of 1": four.tpot_s / one.tpot_s, "half of the way to 4": 2.5},
                partial(_why_passes_share, lab, machine, four),
                unit="x",
            ),
        ]
    setting = lab.setting(batched(lab, on(lab, CODEBASES[0]), 1), memory)
    return lab.finding(setting, tables, checks, ["requests of a batch begin together"])


def _why_prompts_add_up(lab: Lab, machine: Hardware) -> str:
    shares = [show(experts_needed(lab, machine, size, decode=False), "share") for size in (1, 4)]
    return f"one prompt needs {shares[0]} of a layer's experts, four together {shares[1]}"


def _why_passes_share(lab: Lab, machine: Hardware, four: Row) -> str:
    """Of decode."""
    one, together = (experts_needed(lab, machine, size, decode=True) for size in (1, 4))
    return (
        f"requests share experts: a pass of one needs {show(one, 'share')} of a layer's, of four "
        f"{show(together, 'share')}, which is {show(together / one, 'x')}; {show(four.hit_rate, 'share')} are hits"
    )


SAME_MEMORY = {16: "12.5%", 8: "25%", 4: "50%"}
"""Of the experts: what fits into the memory that half of them take at 4 bits."""
OF_BITS = ("2.049x and 1.29x faster", "1.21x and 1.742x faster")


@PAPER.experiment("23", "24", "25", takes=("system", "hardware"), most=1)
def bits(lab: Lab) -> Finding:
    """Latency by bits per weight

    From 16 to 4 bits at the same cache rate ProMoE stays 2.049x (1.21x) before LRU and 1.29x (1.742x) before static
    in prefill (decode) of DS-1, stable over bits (23, llama.cpp). In the same memory, at cache rates that fall as bits
    rise, its gain over LRU in prefill falls from 2.064x at 4 bits to 1.105x at 16 (24, llama.cpp, QW-2). In
    transformers prefetching is hidden completely as bits fall (25).
    """
    half = dict.fromkeys(BITS, "50%")
    figures = {
        "23: half of the experts, llama.cpp": (CODEBASES[1], half),
        "24: the same memory, llama.cpp": (CODEBASES[1], SAME_MEMORY),
        "25: half of the experts, transformers": (CODEBASES[0], half),
    }
    metrics = [TTFT] * lab.subject.has_prompts + [TPOT]
    tables: list[FindingTable] = []
    found: dict[str, dict[int, dict[str, Row]]] = {}
    for title, (codebase, memories) in figures.items():
        runs = {num: _with_bits(lab, codebase, num) for num in BITS}
        of_bits = found[title[:2]] = {num: one.rows(SYSTEMS, memories[num]) for num, one in runs.items()}
        added = {num: one.beside(memories[num]) for num, one in runs.items()}
        systems = list(dict.fromkeys(name for more in added.values() for name in (*SYSTEMS, *more)))
        cells: list[tuple[Cell, ...]] = []
        for num, rows in of_bits.items():
            every = rows | added[num]
            times = [one.of(every[name]) if name in every else None for one in metrics for name in systems]
            gain = metrics[0].of(rows["lru"]) / metrics[0].of(rows["promoe"])
            cells.append((num, memories[num], *times, gain, rows["promoe"].waiting(True)))
        names = [f"{name}, {one.header}" for one in metrics for name in systems]
        phase = "prompts" if lab.subject.has_prompts else "decode"
        columns = {"bits": "", "kept": "", **dict.fromkeys(names, "ms"), f"LRU of ProMoE, {phase}": "x"}
        tables.append(FindingTable.of(title, columns | {"ProMoE waits": "share"}, cells))
    checks = [
        one.everywhere(f"23: ProMoE has the lowest {one.header} at all bits", found["23"], "promoe", paper=paper)
        for one, paper in zip((TTFT, TPOT), OF_BITS, strict=True)
    ]
    same = found["24"]
    if lab.subject.has_prompts:  # of decode the paper prints no numbers
        checks.append(
            rules.monotonic(
                "24: in the same memory its gain over LRU in prompts rises as bits fall",
                {f"{num} bits": rows["lru"].ttft_s / rows["promoe"].ttft_s for num, rows in same.items()},
                partial(of_prompts, same[16]["promoe"], same[4]["promoe"]),
                rises=True,
                unit="x",
                slack=NEGLIGIBLE,
                paper="1.105x at 16 bits, 2.064x at 4",
            )
        )
    waits = {num: rows["promoe"] for num, rows in found["25"].items()}
    checks.append(WAITING.monotonic("25: with fewer bits ProMoE waits less", waits, rises=False))
    notes = [
        "bytes to load are scaled by the bits, by a link as many times faster; computing stays as it is, as the paper "
        "says of it; what unpacking takes is not counted"
    ]
    return lab.finding(lab.setting(runs_on(lab, CODEBASES[1]), ""), tables, checks, notes)


def _with_bits(lab: Lab, codebase: str, num: int) -> Runs:
    machine = with_link(on(lab, codebase), 16 / num)
    return lab.once(("bits", codebase, num), lambda: lab.runs_of(lab.schedules(), machine))
