"""fMoE: figures 3, 4 and 8 to 16, in the simulator."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np

from expertly.core.geometry import Geometry
from expertly.lab.papers import findings as rules
from expertly.lab.papers.findings import Cell, Finding, FindingTable, MeanOfRequests, experiment, show
from expertly.lab.papers.metrics import (
    HITS,
    LOADED,
    RIGHT,
    TPOT,
    TTFT,
    Metric,
    grid,
    of_hits,
    of_steps,
    of_time,
    table_of,
)
from expertly.lab.papers.runs import SPLIT, CannotRun, Lab, Row, batched
from expertly.lab.trace_analysis import EntropyMeter
from expertly.policies.learned import ModelShape
from expertly.policies.predictor.fmoe.store import MapStore
from expertly.sim.hardware import Hardware, read_geometry
from expertly.sim.schedule import Arrivals, Schedule, Selection, make_schedule
from expertly.trace.schema import max_experts

HARDWARE = "rtx3090"
SYSTEMS = ("fmoe", "mixtral-offloading", "promoe", "moe-infinity-lfu", "on-demand")
COUNTS = "fmoe:prediction=counts:eviction=lfu"
DISTANCES = (1, 2, 3, 4, 5, 6)
DISTANCE = 3  # of the paper
LATE = Metric("late predictions", "", lambda row: row["predictions_late"])
IN_TIME = Metric("there in time", "share", lambda row: row["timeliness"], lowest=False)

# -- 3: how predictable routing is ---------------------------------------------------------------------------------

GROWTH_TOKENS = 64
"""Of a request, at least; growth is shown up to there, so that each point is of the same requests."""


@experiment("fmoe:3", also=("3a", "3b", "3c"), most=4)
def entropy(lab: Lab) -> Finding:
    """Entropy of expert patterns, of iterations and of requests

    Request-level patterns have significantly higher entropy than iteration-level ones (3b, six pairs of model and
    data set, axis 0 to 4 bits); the mean entropy per layer grows as iterations are aggregated (3c, 0 to 50
    iterations).
    """
    trace, layers = lab.trace, lab.trace.manifest.layers
    has_probs = trace.has("probs")
    fields = ["request", "experts", "weights", *["probs"] * has_probs]
    meter = EntropyMeter(len(layers), max_experts(layers), [one.num_rows for one in trace.requests])
    num_rows = num_requests = active = 0
    for request in [one for one in trace.requests if one.num_rows >= GROWTH_TOKENS]:
        if num_rows >= 16 * lab.num_tokens:
            break
        used = np.zeros((len(layers), max_experts(layers)), bool)
        for block in trace.blocks(fields, request.first_row, request.first_row + request.num_rows, 1024):
            columns = block.columns
            meter.add(columns["request"], columns["experts"], columns["weights"], columns.get("probs"))
            for layer in range(len(layers)):
                used[layer, np.minimum(columns["experts"][:, layer].ravel(), max_experts(layers) - 1)] = True
        active += int(used.sum())
        num_rows, num_requests = num_rows + request.num_rows, num_requests + 1
    if not num_requests:
        raise CannotRun(f"no request of at least {GROWTH_TOKENS} tokens")
    token = float((meter.token_bits / meter.num_tokens).mean())
    request_bits = float((meter.request_bits / meter.num_requests).mean())
    growth = {
        str(tokens): float((bits / np.maximum(meter.growth_requests[tokens], 1)).mean())
        for tokens, bits in sorted(meter.growth_bits.items())
        if tokens <= GROWTH_TOKENS
    }
    kind = "all experts' probabilities" if has_probs else "the chosen experts' weights"
    used_share = active / num_requests / (len(layers) * lab.num_experts)
    chosen_share = lab.top_k / lab.num_experts
    rows = [
        ("one iteration", token, chosen_share),
        ("a whole request", request_bits, used_share),
        ("the most there can be", float(np.log2(lab.num_experts)), 1.0),
    ]
    columns_of = {"": "", "entropy, bits": "bits", "experts used": "share"}
    tables = [
        FindingTable.of("3a, 3b: mean of layers", columns_of, rows),
        FindingTable.of("3c: of a request's first tokens", {"tokens": "", "entropy, bits": "bits"}, [*growth.items()]),
    ]
    checks = [
        rules.below(
            "3b: the entropy of an iteration is below that of a request",
            {"iteration": token, "request": request_bits},
            f"a request uses {used_share:.1%} of the experts, an iteration {chosen_share:.1%}",
            unit="bits",
        ),
        rules.monotonic(
            "3c: entropy grows over iterations",
            growth,
            f"it grows to {max(growth.values()):.2f} bits and falls as requests settle on a narrow task: the later "
            f"tokens of these {num_requests} requests use fewer kinds of experts than the first did",
            rises=True,
            unit="bits",
        ),
    ]
    setting = f"{num_requests} requests of {GROWTH_TOKENS} tokens and more, {num_rows} tokens; of {kind}, divided by "
    return lab.finding(f"{setting}their sum", tables, checks)


# -- 4: how many layers ahead --------------------------------------------------------------------------------------


@experiment("fmoe:4", most=1)
def distance_hits(lab: Lab) -> Finding:
    """Hit rate by prefetch distance, maps against request counts

    Hit rates fall as the distance grows (axis 0 to 30 layers); fine-grained (iteration-level) offloading hits
    significantly more than coarse-grained at every distance, for Mixtral-8x7B, Qwen1.5-MoE and Phi-3.5-MoE.
    """
    runs = lab.runs(HARDWARE)
    maps = {d: runs.row(f"fmoe:select=top-k:distance={d}") for d in DISTANCES}
    counts = {d: runs.row(f"{COUNTS}:distance={d}") for d in DISTANCES}
    columns = {"d": "", "maps, K experts": "share", "of these right": "share", "request counts": "share"}
    columns["of these right, counts"] = "share"
    cells = [(d, *(of(one[d]) for one in (maps, counts) for of in (HITS.of, RIGHT.of))) for d in DISTANCES]
    first, last = DISTANCES[0], DISTANCES[-1]
    is_finer = {d: HITS.told({"maps": maps[d], "counts": counts[d]}, "maps") for d in DISTANCES}

    def right(rows: dict[int, Row]) -> str:
        return " and ".join(f"{rows[d]['prediction_accuracy']:.1%} at d = {d}" for d in (first, last))

    checks = [
        HITS.monotonic(
            "hit rate falls with the distance, with maps",
            {f"d={d}": row for d, row in maps.items()},
            lambda: (
                "the nearest distances leave less time to load: of what is needed of the prefetched "
                + ", ".join(f"{maps[d]['timeliness']:.1%} (d = {d})" for d in DISTANCES)
                + " is there in time, while what is named gets less right"
            ),
            rises=False,
            slack=0.01,
        ),
        rules.everywhere(
            "maps (fine-grained) hit more than counts (coarse-grained) at every distance",
            {f"d={d}": is_finer[d] for d in DISTANCES},
            "hit rate of maps > of request counts",
            lambda: of_hits(*next((maps[d], counts[d]) for d in DISTANCES if maps[d].hit_rate <= counts[d].hit_rate)),
        ),
        rules.below(
            "and lose less by distance",
            {
                "maps lose": maps[first].hit_rate - maps[last].hit_rate,
                "counts lose": counts[first].hit_rate - counts[last].hit_rate,
            },
            lambda: (
                "counts of the request are the same at every distance, so they have nothing to lose: they are right "
                f"in {right(counts)} of cases; maps in {right(maps)}"
            ),
            unit="share",
        ),
    ]
    return lab.finding(lab.setting(runs, "25%"), [FindingTable.of("Hit rate of decode", columns, cells)], checks)


# -- 8: does a similar map mean that what it names is needed? --------------------------------------------------------

LEAST_R = 0.3


@experiment("fmoe:8")
def similarity(lab: Lab) -> Finding:
    """Correlation of similarity and hit rate

    Pearson's r from 0.74 to 0.97 over three models and two data sets, semantic and trajectory similarity alike:
    high similarity goes with a high hit rate. Taken as shown here from r = 0.3 on.
    """
    runs = lab.runs(HARDWARE)
    row = runs.row("fmoe")
    kinds = {"semantic": row["similarity_correlation_semantic"], "trajectory": row["similarity_correlation_trajectory"]}
    means = {name: row["predictor"].get(f"{name}_score") for name in kinds}
    table = FindingTable.of(
        "Pearson's r of similarity and share of what was needed",
        {"": "", "r": "number", "mean similarity": "number"},
        [(name, value, means[name]) for name, value in kinds.items()],
    )
    found = {name: value for name, value in kinds.items() if value is not None}
    checks = [
        rules.within(
            f"{name} similarity goes with hits",
            f"r, {name}",
            value,
            LEAST_R,
            1.0,
            f"the mean similarity is {means[name] or 0:.2f}; of what is needed "
            f"{show(row['recall'], 'share')} was named",
        )
        for name, value in found.items()
    ]
    notes = [] if len(found) == 2 else ["no embeddings were recorded: trajectories alone are matched"]
    return lab.finding(lab.setting(runs, "25%"), [table], checks, notes)


# -- 9, 10, 11: beside four others ---------------------------------------------------------------------------------


@experiment("fmoe:9")
def overall(lab: Lab) -> Finding:
    """TTFT, TPOT and hit rate beside four systems

    Against DeepSpeed-Inference, Mixtral-Offloading, ProMoE and MoE-Infinity fMoE takes 44, 35, 33, 30 % off TTFT
    and 70, 61, 55, 48 % off TPOT, and hits 147, 11, 34, 63 % more. Its ProMoE is a prototype of the authors' own
    (section 6.1); here it is ProMoE with networks trained on this model.
    """
    runs = lab.runs(HARDWARE)
    rows = runs.rows((*SYSTEMS, "lru", "oracle"))
    others = {name: rows[name] for name in SYSTEMS}
    slow = {name: rows[name] for name in ("mixtral-offloading", "promoe", "moe-infinity-lfu")}
    checks = [
        TTFT.best("fMoE has the lowest TTFT", others, "fmoe"),
        TPOT.best("fMoE has the lowest TPOT", others, "fmoe"),
        HITS.ranked("hit rate: fMoE > Mixtral-Offloading > ProMoE > MoE-Infinity > DeepSpeed", others),
        TPOT.worst(
            "Mixtral-Offloading hits more than the other three, but waiting for its prefetches costs time",
            slow,
            "mixtral-offloading",
        ),
    ]
    table = table_of("At 25 % of the experts", rows, TTFT, TPOT, HITS, LOADED)
    return lab.finding(lab.setting(runs, "25%"), [table], checks)


REQUESTS = 64
MEAN_GAP_S = 2.0
"""Between arrivals that are made up."""
LATENCIES = {"mean": "mean", "median": "p50", "p90": "p90", "p99": "p99"}


def _latency(key: str, row: Row) -> float:
    return float(row["latency_s"][key])


@experiment("fmoe:10", needs=("prompts",), most=1)
def online(lab: Lab) -> Finding:
    """Latency of requests, online

    64 requests sampled from Azure's trace (arrivals and lengths), with empty stores: the CDF of fMoE's request
    latency lies left of those of ProMoE, MoE-Infinity, Mixtral-Offloading and DeepSpeed for all three models.
    """
    arrivals = _sample(lab)
    schedule = make_schedule(lab.trace, Selection(len(arrivals), None, SPLIT, lab.seed), arrivals)
    runs = lab.runs_of(Schedule([], schedule.test, schedule.num_cut), HARDWARE, is_queued=True)
    rows = runs.rows(SYSTEMS)
    times = [Metric(header, "s", partial(_latency, key)) for header, key in LATENCIES.items()]
    fastest = min((row for name, row in rows.items() if name != "fmoe"), key=lambda row: row["latency_s"]["mean"])
    checks = [
        one.best(f"fMoE has the lowest latency ({label})", rows, "fmoe", lambda: of_time(rows["fmoe"], fastest))
        for one, label in zip(times, ("mean", "median", "90 %"), strict=False)
    ]
    num = rows["fmoe"]["requests"]
    note = f"{num} requests; {schedule.num_cut} of them are shorter than their arrivals say: the trace holds no more"
    if lab.arrivals is None:
        note = f"{num} requests; arrivals are made up: {MEAN_GAP_S} s apart in the mean, exponential; --arrivals takes "
        note += "recorded ones"
    table = table_of("Latency of requests", rows, *times, HITS)
    return lab.finding(f"{lab.setting(runs, '25%')}; online", [table], checks, [note])


def _sample(lab: Lab) -> Arrivals:
    num = REQUESTS // (6 if lab.quick else 1)
    dice, given = np.random.default_rng(lab.seed), lab.arrivals
    if given is None:
        times = np.cumsum(dice.exponential(MEAN_GAP_S * 1e9, num)).astype(np.int64)
        most = np.full(num, 1 << 30, np.int64)
        return Arrivals(times - times[0], most, most)
    chosen = np.sort(dice.choice(len(given), min(num, len(given)), replace=False))
    times = given.times_ns[chosen]
    return Arrivals(times - times[0], given.prompt_tokens[chosen], given.output_tokens[chosen])


BUDGETS = ("10%", "25%", "50%", "75%")


@experiment("fmoe:11", most=1)
def budgets(lab: Lab) -> Finding:
    """TPOT by memory for experts

    From 6 to 96 GB fMoE is fastest; at 6 GB it takes 32, 24, 18, 18 % off the TPOT of DeepSpeed-Inference,
    Mixtral-Offloading, ProMoE and MoE-Infinity. DeepSpeed is slowest.
    """
    runs = lab.runs(HARDWARE)
    found = {memory: runs.rows(SYSTEMS, memory) for memory in BUDGETS}
    steps = {name: [(found[a][name], found[b][name]) for a, b in pairwise(BUDGETS)] for name in SYSTEMS}
    fastest = {memory: min(rows.values(), key=lambda row: row.tpot_s) for memory, rows in found.items()}

    def is_faster(smaller: Row, larger: Row) -> bool:
        return larger.tpot_s <= smaller.tpot_s * 1.01

    checks = [
        rules.everywhere(
            "fMoE is fastest at every budget",
            {f"{memory} ({fastest[memory].system})": TPOT.told(rows, "fmoe") for memory, rows in found.items()},
            "lowest TPOT (the fastest is in brackets)",
            lambda: (
                "for instance: "
                + next(of_time(found[at]["fmoe"], row) for at, row in fastest.items() if row.system != "fmoe")
            ),
        ),
        rules.everywhere(
            "every system gets faster with memory",
            {name: all(is_faster(*step) for step in own) for name, own in steps.items()},
            "TPOT falls from budget to budget, to 1 %",
            lambda: of_steps(*next(step for own in steps.values() for step in own if not is_faster(*step))),
        ),
        TPOT.worst("at the least memory DeepSpeed is slowest", found[BUDGETS[0]], "on-demand"),
    ]
    return lab.finding(lab.setting(runs), [grid("TPOT", found, TPOT, "memory")], checks)


# -- 12: what predicts, and what goes ------------------------------------------------------------------------------

TRACKING = {
    "speculate": f"fmoe:prediction=lookahead:eviction=lfu:distance={DISTANCE}",
    "hit count": f"{COUNTS}:distance={DISTANCE}",
    "map (T)": f"fmoe:semantic=no:select=top-k:distance={DISTANCE}",
    "map (T+S)": f"fmoe:select=top-k:distance={DISTANCE}",
    "map (T+S+delta)": f"fmoe:distance={DISTANCE}",
}
NAMED = Metric("named, of needed", "share", lambda row: row["recall"], lowest=False)


@experiment("fmoe:12a", also=("12",), most=1)
def tracking(lab: Lab) -> Finding:
    """Hit rate by what predicts

    Hit count is worst; Map (T) < Map (T+S) < Map (T+S+delta), which is best; speculation lies between at d = 3.
    """
    runs = lab.runs(HARDWARE)
    rows = runs.rows(TRACKING)
    maps = {label: rows[label] for label in reversed(TRACKING) if label.startswith("map")}
    score = rows["map (T+S+delta)"]["predictor"].get("trajectory_score") or 0
    why = f"matches are sure (mean similarity {score:.2f}), so that delta adds few experts"
    if not lab.trace.is_real("embedding"):
        why += ", and this trace's embeddings were not recorded, so S has nothing real to match"
    checks = [
        HITS.worst("the request's hit counts are worst", rows, "hit count"),
        HITS.ranked("T < T+S < T+S+delta", maps, why, slack=0.0005),
        HITS.better("full maps hit more than speculation", rows, "map (T+S+delta)", "speculate"),
    ]
    return lab.finding(lab.setting(runs, "25%"), [table_of(f"12a, d = {DISTANCE}", rows, HITS, NAMED, RIGHT)], checks)


@experiment("fmoe:12b")
def eviction(lab: Lab) -> Finding:
    """Hit rate by what goes

    LRU performs poorly, LFU hits more, fMoE's 1/(p x freq) most, for all three models.
    """
    runs = lab.runs(HARDWARE)
    rows = runs.rows({name: f"fmoe:eviction={name}:distance={DISTANCE}" for name in ("lru", "lfu", "fmoe")})
    loaded = LOADED.values(rows)

    def why() -> str:
        said = []
        if loaded["fmoe"] > loaded["lfu"]:
            said.append(f"p x freq loads {loaded['fmoe'] / loaded['lfu']:.3f}x what freq alone does")
            if not lab.trace.has("probs"):
                said.append("imported routing has the chosen experts' weights alone, so that p tells nothing of others")
        if loaded["lfu"] > loaded["lru"]:
            said.append("which of recency and frequency is better is the workload's: here it is recency")
        return "; ".join(said) or "differences are a fraction of a point of hits; bytes are in the order of the paper"

    ordered = {name: rows[name] for name in ("fmoe", "lfu", "lru")}
    checks = [HITS.ranked("fMoE > LFU > LRU", ordered, why), LOADED.ranked("and so many bytes", ordered, why)]
    title = f"12b, one cache over all layers, the same prediction, d = {DISTANCE}"
    return lab.finding(lab.setting(runs, "25%"), [table_of(title, rows, HITS, TPOT, LOADED, key="what goes")], checks)


# -- 13: by prefetch distance ----------------------------------------------------------------------------------------


@experiment("fmoe:13", most=1)
def distance_times(lab: Lab) -> Finding:
    """TTFT and TPOT by prefetch distance

    Below d = 3 matching and prefetching are not hidden, above it hit rates fall: latency is least near d = 3, for
    all three models.
    """
    runs = lab.runs(HARDWARE)
    found = {d: runs.row(f"fmoe:distance={d}") for d in DISTANCES}
    at = min(found, key=lambda d: found[d].tpot_s)

    def why() -> str:
        near, far = found[DISTANCES[0]], found[DISTANCES[-1]]
        begins = (
            f"at d = 1 {near['predictions_late']} predictions come late and {near['timeliness']:.1%} of what is needed "
            f"of the prefetched is there in time, at d = {DISTANCES[-1]} {far['predictions_late']} and "
            f"{far['timeliness']:.1%}"
        )
        if at != DISTANCES[0]:
            return begins
        ends = f"what a longer lead gains is less than what wrong guesses cost: {of_time(far, near)}"
        return f"matching is fast here, so a distance of 1 hides it: {begins}; {ends}"

    named = {f"d={d}": row for d, row in found.items()}
    checks = [
        rules.between("TPOT is a U: least between the ends", TPOT.values(named), why, unit="ms"),
        TPOT.best("d = 3 is best, or near it", named, "d=3", why, slack=0.02),
    ]
    table = table_of("fMoE by prefetch distance", found, TTFT, TPOT, HITS, LATE, IN_TIME, key="d")
    return lab.finding(lab.setting(runs, "25%"), [table], checks)


# -- 14a: how many maps are kept, and what that is worth --------------------------------------------------------------

CAPACITIES = (125, 250, 500, 1000, 1500, 2000)


def _score(kind: str, row: Row) -> float | None:
    found: float | None = row["predictor"].get(f"{kind}_score")
    return found


@experiment("fmoe:14a", also=("14",), most=1)
def capacity(lab: Lab) -> Finding:
    """Similarity by capacity of the map store

    Mean semantic and trajectory similarity rise steeply below 1K maps and little beyond (axis 0.8 to 1.0, 500 to
    1500 maps).
    """
    runs = lab.runs(HARDWARE)
    found = {num: runs.row(f"fmoe:capacity={num}") for num in CAPACITIES}
    metrics, checks = [], []

    def why() -> str:
        held = ", ".join(f"{row['predictor']['maps']} of {num}" for num, row in found.items())
        return f"maps in the store at the end: {held}"

    for kind in ("semantic", "trajectory"):
        one = Metric(f"{kind} similarity", "number", partial(_score, kind))
        values = one.values(found)
        if None in values.values():
            continue
        metrics.append(one)
        checks.append(one.monotonic(f"{one.header} rises with the capacity", found, why, rises=True, slack=0.001))
        late, early = values["2000"] - values["1000"], values["1000"] - values["500"]
        claim = f"{kind}: beyond 1000 maps twice as many win less than below it"
        checks.append(rules.below(claim, {"1000 to 2000": late, "500 to 1000": early}, why))
    table = table_of("By capacity of the store", found, *metrics, HITS, TPOT, key="maps")
    return lab.finding(lab.setting(runs, "25%"), [table], checks)


# -- 14b: several requests at once ---------------------------------------------------------------------------------

SIZES = (1, 2, 3, 4)


@experiment("fmoe:14b", most=1)
def batches(lab: Lab) -> Finding:
    """TTFT and TPOT by batch size

    From batch 1 to 4 (Mixtral-8x7B) fMoE has the lowest TTFT and TPOT in most cases, beside Mixtral-Offloading,
    ProMoE and MoE-Infinity.
    """
    found = {size: batched(lab, HARDWARE, size).rows(SYSTEMS[:4]) for size in SIZES}
    tables, cases = [grid("Time of a decode pass", found, TPOT, "batch")], {}
    for metric in (TPOT, *[TTFT] * lab.subject.has_prompts):
        for size, rows in found.items():
            values = metric.values(rows)
            cases[f"{metric.header}, {size}"] = values["fmoe"] <= min(values.values())
    if lab.subject.has_prompts:
        tables.append(grid("Prompts", found, TTFT, "batch"))
    last = found[SIZES[-1]]

    def why() -> str:
        fastest = min((row for row in last.values() if row.system != "fmoe"), key=lambda row: row.tpot_s)
        return f"at batch {SIZES[-1]}: {of_time(last['fmoe'], fastest)}"

    held = sum(cases.values()) / len(cases)
    checks = [
        rules.within("fMoE is fastest in most cases", "share of cases", held, 0.5, 1.0, why, unit="share"),
        rules.everywhere(
            "a pass takes longer with more requests",
            {name: last[name].tpot_s > found[1][name].tpot_s for name in SYSTEMS[:4]},
            "TPOT at batch 4 above that at 1",
            lambda: of_steps(*(found[size][name] for name in SYSTEMS[:4] for size in (1, 4))),
        ),
    ]
    setting = lab.setting(batched(lab, HARDWARE, 1), "25%")
    return lab.finding(setting, tables, checks, ["requests of a batch begin together"])


# -- 15: what an iteration's time goes to --------------------------------------------------------------------------

MOST_ASKING = 0.05


@experiment("fmoe:15")
def breakdown(lab: Lab) -> Finding:
    """Latency breakdown of an iteration

    Matching, prefetching and updating are asynchronous; without them all other operations add less than 30 ms, 5 %
    of an iteration (100 to 500 ms), for all three models.
    """
    runs = lab.runs(HARDWARE)
    row = runs.row("fmoe")
    num, total, waiting = len(row.passes_s), float(row.passes_s.sum()), float(row.waiting_s.sum())
    matching = row.predicting_s.get("begin", 0.0) + row.predicting_s.get("router", 0.0)
    parts = {
        "inference: computing": (total - waiting - row.asking_s, "in the pass"),
        "expert load: waiting for experts": (waiting, "in the pass"),
        "asking for experts": (row.asking_s, "in the pass"),
        "map match": (matching, "beside it"),
        "map update": (row.predicting_s.get("update", 0.0), "beside it"),
        "link busy: loads and prefetches": (row.loading_s, "beside it"),
    }
    rows = [(what, where, spent / num, spent / total) for what, (spent, where) in parts.items()]
    checks = [
        rules.below(
            "matching and updating fit beside the pass",
            {"matcher busy": sum(row.predicting_s.values()) / total, "the iteration": 1.0},
            "matching takes longer than the layers that it runs beside: "
            f"{row['predictions_late']} predictions were late",
            unit="share",
        )
    ]
    if row.asking_s:  # profiles that were not measured know of no such time
        checks.append(
            rules.below(
                "what fMoE adds to the pass itself is below 5 % of an iteration",
                {"asking for experts": row.asking_s / total, "5 %": MOST_ASKING},
                f"an iteration takes {show(total / num, 'ms')}, {show(row.asking_s / num, 'ms')} of it for asking",
                unit="share",
            )
        )
    note = (
        "simulated: matching is charged what it was measured to read and compute; collecting context is not modelled "
        "(the engine keeps references in the pass, and copies them in the matcher's thread)"
    )
    note += "" if row.asking_s else f", nor what asking for experts takes: the profile {HARDWARE} has no time for it"
    columns = {"": "", "where": "", "an iteration": "ms", "of its time": "share"}
    return lab.finding(lab.setting(runs, "25%"), [FindingTable.of("Of all iterations", columns, rows)], checks, [note])


# -- 16: what the maps take -------------------------------------------------------------------------------------------

MODELS = ("mixtral-8x7b", "qwen1.5-moe", "phi-3.5-moe")
STORES = (1000, 2000, 4000, 8000, 16000, 32000)
MOST_NBYTES = 200e6


@experiment("fmoe:16", most=1)
def memory(lab: Lab) -> Finding:
    """Memory of the map store

    From 1K to 32K maps Qwen1.5-MoE takes the most, and all three models less than 200 MB at 32K.
    """
    sizes_of = {name: read_geometry(name).layers for name in MODELS}
    shapes = {name: ModelShape.of(Geometry(layers)) for name, layers in sizes_of.items()}
    cells: list[tuple[Cell, ...]] = []
    largest = {}
    for name in MODELS:
        sizes = [MapStore.nbytes_of(shapes[name], num, sizes_of[name][0].hidden_size) for num in STORES]
        cells += [(f"{name}: maps", *(one[0] for one in sizes)), (f"{name}: embeddings", *(one[1] for one in sizes))]
        largest[name] = float(sizes[-1][0])
    said = ", ".join(f"{name}: {shape.num_layers} layers of {shape.max_experts}" for name, shape in shapes.items())
    checks = [
        rules.best("Qwen1.5-MoE's maps take the most memory", largest, "qwen1.5-moe", said, lowest=False, unit="MB"),
        rules.everywhere(
            "32K maps take less than 200 MB",
            {name: value < MOST_NBYTES for name, value in largest.items()},
            "maps at 32 000 below 200 MB",
            "maps are float32 in memory, so that matching is a BLAS product",
        ),
    ]
    table = FindingTable.of("Memory of a full store", {"": "", **{f"{num} maps": "MB" for num in STORES}}, cells)
    notes = ["maps alone, as in the paper; the embeddings beside them are on a line of their own"]
    return lab.finding("no trace: sizes of the papers' models", [table], checks, notes)


# -- not in the paper: where prefetching pays, and when an empty store is worth having -------------------------------

LINK_RATES = (0.5e9, 2e9, 8e9, 16e9, 32e9, 64e9)  # bytes a second


@experiment("fmoe:link", most=1)
def link(lab: Lab) -> Finding:
    """TPOT by the rate of the link, beside a cache alone

    Not shown: the paper's machines have one link each. What is loaded ahead costs time of the link that demand
    loads need; where that pays depends on its rate.
    """
    machine, schedule = Hardware.read(HARDWARE), lab.schedule()
    cells: list[tuple[Cell, ...]] = []
    cases, slower = {}, []
    for rate in LINK_RATES:
        runs = lab.runs_of(schedule, replace(machine, link=replace(machine.link, nbytes_per_s=rate)))
        rows = runs.rows(("fmoe", "lru", "oracle", "resident"))
        lru, gap = rows["lru"].tpot_s, rows["lru"].tpot_s - rows["oracle"].tpot_s
        closed = (lru - rows["fmoe"].tpot_s) / gap if gap > 0 else None
        label = f"{rate / 1e9:g} GB/s"
        cells.append((label, *TPOT.values(rows).values(), closed, rows["fmoe"]["predictions_late"]))
        cases[label] = rules.compare(("fmoe", "lru"), TPOT.values(rows), lowest=True)
        slower += [f"{label}: {of_time(rows['fmoe'], rows['lru'])}"] * (rows["fmoe"].tpot_s > lru)
    columns = {
        "link": "",
        **dict.fromkeys(("fmoe", "lru", "oracle", "resident"), "ms"),
        "of lru's gap to oracle": "share",
    }
    table = FindingTable.of("TPOT by the rate of the link", columns | {"late predictions": ""}, cells)
    check = rules.everywhere("fMoE is no slower than a cache alone", cases, "TPOT <= lru's", lambda: "; ".join(slower))
    return lab.finding(lab.setting(runs, "25%"), [table], [check])


@experiment("fmoe:start")
def start(lab: Lab) -> Finding:
    """Requests until an empty store is worth having

    Figure 10 begins with empty stores, but does not say after how many requests they help.
    """
    runs = lab.runs(HARDWARE, times=3, online=True)
    rows = runs.rows(("fmoe", "lru"))
    so_far = {}
    for name, row in rows.items():
        hits = row.hit_rate
        if not isinstance(hits, MeanOfRequests):
            raise CannotRun("its rows are not of one request each")
        so_far[name] = np.cumsum(hits.sums) / np.maximum(np.cumsum(hits.counts), 1)
    behind = np.flatnonzero(so_far["fmoe"] <= so_far["lru"])
    num = len(so_far["lru"])
    at = int(behind[-1]) + 2 if len(behind) else 1
    shown = [count for count in (1, 2, 3, 5, 10, 20, 50, 100) if count < num] + [num]
    cells = [(count, *(float(one[count - 1]) for one in so_far.values())) for count in shown]
    check = rules.within(
        "maps of its own requests are soon worth more than recency",
        "requests until fMoE's hit rate so far stays above lru's",
        at,
        1,
        num,
        lambda: of_hits(rows["fmoe"], rows["lru"]),
    )
    table = FindingTable.of("Hit rate so far, from nothing", {"requests": "", "fmoe": "share", "lru": "share"}, cells)
    return lab.finding(lab.setting(runs, "25%"), [table], [check])
