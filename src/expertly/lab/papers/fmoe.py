"""fMoE: figures 3, 4 and 8 to 16, in the simulator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise, product

import numpy as np

from expertly.core.geometry import Geometry
from expertly.lab.papers import findings as rules
from expertly.lab.papers.findings import NEGLIGIBLE, TAKEN, Cell, Check, Finding, FindingTable, OfPair, Paper, Why, show
from expertly.lab.papers.measured import Estimate
from expertly.lab.papers.metrics import (
    HITS,
    LOADED,
    ON_FASTER_LINK,
    RIGHT,
    TPOT,
    TTFT,
    Metric,
    grid,
    of_hits,
    of_steps,
    of_time,
    on_faster_link,
    table_of,
)
from expertly.lab.papers.runs import CannotRun, Lab, Row, batched, with_link
from expertly.lab.trace_analysis import EntropyMeter
from expertly.policies.learned import ModelShape
from expertly.policies.predictor.fmoe.store import MapStore
from expertly.sim.hardware import read_geometry
from expertly.sim.schedule import Arrivals, Schedule, arriving
from expertly.trace.schema import max_experts

PAPER = Paper("fmoe", "fMoE: Taming Latency-Memory Trade-Off in MoE-Based LLM Serving")

HARDWARE = "rtx3090"
COUNTS = "fmoe:prediction=counts:eviction=lfu"
DISTANCES = (1, 2, 3, 4, 5, 6)
DISTANCE = 3  # of the paper
FMOE = f"fmoe:distance={DISTANCE}"
WINDOW, PART, COLLECTED = 6, 4, 1000
"""Of MoE-Infinity in the authors' artifact (IntelliSys-Lab/FineMoE-EuroSys26, `moe_infinity/memory`): of the one
nearest matrix of so many it names a quarter of the experts of each of the next six layers.
"""
LATE = Metric("late predictions", "", lambda row: row["predictions_late"])
IN_TIME = Metric("there in time", "share", lambda row: row["timeliness"], lowest=False)

AT_3, STRIDE, ARTIFACT = f"fmoe (d = {DISTANCE})", "promoe (stride)", "moe-infinity (artifact)"
BESIDE = {name: name for name in ("fmoe", "promoe", "moe-infinity-lfu")}
"""fMoE at our distance, and two baselines as we have them: ProMoE with networks trained on this model."""


def moe_infinity(num_experts: int, distance: int = WINDOW, width: int | None = None) -> str:
    """As the authors ran it: activation matrices of the training part, synchronous, LFU (section 6.1)."""
    width = width or max(1, num_experts // PART)
    return (
        "moe-infinity:eviction=lfu:transfer=synchronous:"
        f"distance={distance}:matches=1:width={width}:capacity={COLLECTED}"
    )


def stride(distance: int = DISTANCE) -> str:
    """ProMoE's prototype: stride-based and speculative, on MoE-Infinity's code, which evicts by LFU (section 6.1)."""
    return f"lfu:scope=global:prediction=lookahead:distance={distance}:prefill=evict"


def systems(lab: Lab) -> dict[str, str]:
    """fMoE at the paper's distance, and its four baselines as its authors had them, by label."""
    return {
        AT_3: FMOE,
        "mixtral-offloading": "mixtral-offloading",
        STRIDE: stride(),
        ARTIFACT: moe_infinity(lab.num_experts),
        "on-demand": "on-demand",
    }


AS_THEY_RAN = (
    f"{ARTIFACT}: of the nearest of {COLLECTED} matrices of other requests a quarter of the experts of the next "
    f"{WINDOW} layers, waited for, LFU; {STRIDE}: the router {DISTANCE} layers ahead, asked early, LFU; "
    "below them what is ours"
)
LESS_TTFT = {"on-demand": 0.44, "mixtral-offloading": 0.35, STRIDE: 0.33, ARTIFACT: 0.30}
LESS_TPOT = {"on-demand": 0.70, "mixtral-offloading": 0.61, STRIDE: 0.55, ARTIFACT: 0.48}
MORE_HITS = {"on-demand": 1.47, "mixtral-offloading": 0.11, STRIDE: 0.34, ARTIFACT: 0.63}

# -- 3: how predictable routing is ---------------------------------------------------------------------------------

GROWTH_TOKENS = 64
"""Of a request, at least; growth is shown up to there, so that each point is of the same requests."""


@PAPER.experiment("3", "3a", "3b", "3c", most=4)
def entropy(lab: Lab) -> Finding:
    """Entropy of expert patterns, of iterations and of requests

    Request-level patterns have significantly higher entropy than iteration-level ones (3b, six pairs of model and
    data set, axis 0 to 4 bits); the mean entropy per layer grows as iterations are aggregated (3c, 0 to 50
    iterations).
    """
    trace, layers = lab.trace, lab.trace.manifest.layers
    has_probs = trace.has("probs")
    fields = ["request", "experts", "weights", *["probs"] * has_probs]
    requests = [one for one in trace.requests if one.num_rows >= GROWTH_TOKENS]
    np.random.default_rng(lab.options.seed).shuffle(requests)  # type: ignore[arg-type]
    num_rows = active = 0
    bits: list[dict[str, float]] = []  # of each request
    for request in requests:
        if num_rows >= 16 * lab.tokens_of_seed:
            break
        meter = EntropyMeter(len(layers), max_experts(layers), [request.num_rows])
        used = np.zeros((len(layers), max_experts(layers)), bool)
        for block in trace.blocks(fields, request.first_row, request.first_row + request.num_rows, 1024):
            columns = block.columns
            own = np.zeros(len(columns["request"]), np.int64)
            meter.add(own, columns["experts"], columns["weights"], columns.get("probs"))
            for layer in range(len(layers)):
                used[layer, np.minimum(columns["experts"][:, layer].ravel(), max_experts(layers) - 1)] = True
        active += int(used.sum())
        num_rows += request.num_rows
        growth_of = {str(mark): float(one.mean()) for mark, one in meter.growth_bits.items() if mark <= GROWTH_TOKENS}
        token = float((meter.token_bits / np.maximum(meter.num_tokens, 1)).mean())
        bits.append(growth_of | {"iteration": token, "request": float(meter.request_bits.mean())})
    if not bits:
        raise CannotRun(f"no request of at least {GROWTH_TOKENS} tokens")
    num_requests = len(bits)

    def backwards() -> str:
        """The same requests' first tokens in reverse."""
        meter = EntropyMeter(len(layers), max_experts(layers), [GROWTH_TOKENS] * num_requests)
        for number, request in enumerate(requests[:num_requests]):
            rows = request.first_row, request.first_row + GROWTH_TOKENS
            columns = {name: trace.rows(name, *rows)[::-1] for name in fields}
            meter.add(np.full(GROWTH_TOKENS, number), columns["experts"], columns["weights"], columns.get("probs"))
        bits = {mark: float(one.mean()) / num_requests for mark, one in sorted(meter.growth_bits.items())}
        return ", ".join(f"{mark} {value:.2f}" for mark, value in bits.items())

    means = {name: Estimate.mean(np.array([one[name] for one in bits])) for name in bits[0]}
    token, request_bits = means.pop("iteration"), means.pop("request")
    growth = {mark: means[mark] for mark in sorted(means, key=int)}
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
            lambda: (
                f"it grows to {max(growth.values()):.2f} bits and falls: later tokens use fewer kinds of experts than "
                f"the first; tried with the same tokens in reverse: {backwards()}"
            ),
            rises=True,
            unit="bits",
            slack=NEGLIGIBLE,
        ),
    ]
    setting = f"{num_requests} requests of {GROWTH_TOKENS} tokens and more, {num_rows} tokens; of {kind}, divided by "
    return lab.finding(f"{setting}their sum", tables, checks)


# -- 4: how many layers ahead --------------------------------------------------------------------------------------


LINKS = 6
"""The paper's machine has six cards, each on a link of its own, and an expert is on one of them (sections 5, 6.1)."""
ABLATIONS = {
    "8000 maps": "capacity=8000",
    "LFU": "eviction=lfu",
    "LRU": "eviction=lru",
    "LRU in each layer": "eviction=lru:scope=layer",
    "synchronous transfer": "transfer=synchronous",
}


@PAPER.experiment("4", takes=TAKEN, most=3, is_long=True)
def distance_hits(lab: Lab) -> Finding:
    """Hit rate by prefetch distance, maps against request counts and the other baselines

    Hit rates fall as the distance grows (axis 0 to 30 layers); fine-grained (iteration-level) offloading hits
    significantly more than coarse-grained at every distance, for Mixtral-8x7B, Qwen1.5-MoE and Phi-3.5-MoE. Hits are
    147, 11, 34, 63 % more than those of DeepSpeed, Mixtral-Offloading, ProMoE and MoE-Infinity (figure 9).
    """
    machine = lab.machine(HARDWARE)
    runs = lab.runs_of(lab.schedules(), replace(with_link(machine, LINKS), name=f"{LINKS} x {machine.name}"))
    ways: dict[str, Callable[[int], str]] = {
        "maps": lambda d: f"fmoe:distance={d}",
        "request counts": lambda d: f"{COUNTS}:distance={d}",
        "activation matrices": lambda d: moe_infinity(lab.num_experts, d),
    }
    found = {d: runs.rows({name: of(d) for name, of in ways.items()}) for d in DISTANCES}
    maps = {f"d={d}": rows["maps"] for d, rows in found.items()}
    baselines = systems(lab) | {
        f"{ARTIFACT}, K experts": moe_infinity(lab.num_experts, width=lab.top_k),
        "lru": "lru",
    }
    changed = {label: f"{FMOE}:{options}" for label, options in ABLATIONS.items()}
    others, without = runs.rows(baselines), runs.rows(changed)

    def with_best(rows: Mapping[str, Row], other: Row) -> str:
        """Whether fMoE with one part changed makes up for it."""
        best = max(rows, key=lambda label: float(rows[label].hit_rate))
        hits = float(rows[best].hit_rate)
        verdict = "more: that is the reason" if hits > other.hit_rate else "less, too"
        return f"; tried with {best}, fMoE hits {show(hits, 'share')}, which is {verdict}"

    def why(_: str, other: str) -> str:
        modelled = f"{other} is modelled; " if others[other].is_modelled else ""
        return f"{modelled}{of_hits(others[AT_3], others[other])}{with_best(without, others[other])}"

    def also(at: str, better: Row) -> str:
        distance = at.removeprefix("d=")
        rows = {label: f"fmoe:distance={distance}:{options}" for label, options in ABLATIONS.items()}
        return with_best(runs.rows(rows), better)

    def why_rises() -> str:
        there = ", ".join(f"{show(row['timeliness'], 'share')} ({at})" for at, row in maps.items())
        ends = maps[f"d={DISTANCES[0]}"], max(maps.values(), key=lambda row: float(row.hit_rate))
        hits = " and ".join(f"{row.system} {show(row.hit_rate, 'share')}" for row in on_faster_link(*ends))
        return (
            f"of what is needed of the prefetched {there} is there in time, while what is named gets less right; "
            f"{ON_FASTER_LINK} {hits} are hits"
        )

    checks: list[Check | None] = [
        HITS.monotonic(
            "hit rate falls with the distance, with maps",
            maps,
            why_rises,
            rises=False,
        ),
        *(
            HITS.everywhere(
                f"maps (fine-grained) hit more than {name} (coarse-grained) at every distance",
                {f"d={d}": {one: rows[one] for one in ("maps", name)} for d, rows in found.items()},
                "maps",
                paper="significantly more, from d = 1 on (a figure without numbers)",
                also=also,
            )
            for name in ("request counts", "activation matrices")
        ),
        *HITS.sizes(f"hits at d = {DISTANCE} are more than those of", others, AT_3, MORE_HITS, OfPair(why)),
        HITS.better("and more than those of a cache alone (LRU)", others, AT_3, "lru", OfPair(why)),
    ]
    title = f"At d = {DISTANCE}: beside others, and fMoE with one part changed"
    compared = table_of(title, others | without | runs.beside(), HITS, TPOT)
    tables = [grid("Decode", found, (HITS, RIGHT), "d"), compared]
    notes = [
        f"{LINKS} links side by side are simulated as one that is {LINKS} times as fast: kind to one load alone",
        AS_THEY_RAN,
    ]
    return lab.finding(lab.setting(runs), tables, checks, notes)


# -- 8: does a similar map mean that what it names is needed? --------------------------------------------------------

PAPER_R = (0.74, 0.97)


@PAPER.experiment("8", takes=("hardware", "memory"))
def similarity(lab: Lab) -> Finding:
    """Correlation of similarity and hit rate

    Pearson's r from 0.74 to 0.97 over three models and two data sets, semantic and trajectory similarity alike:
    high similarity goes with a high hit rate.
    """
    runs = lab.runs(HARDWARE)
    row, near = runs.row(FMOE), runs.row("fmoe")
    is_real = {"semantic": lab.trace.is_real("embedding"), "trajectory": True}
    found = {name: row[f"similarity_correlation_{name}"] for name in is_real}
    means = {name: row["predictor"].get(f"{name}_score") for name in found}
    labels = {name: name if is_real[name] else f"{name} (embeddings made up)" for name in found}
    table = FindingTable.of(
        "Pearson's r of similarity and share of what was needed",
        {"": "", "r": "number", "mean similarity": "number", "r at our distance": "number"},
        [(labels[name], value, means[name], near[f"similarity_correlation_{name}"]) for name, value in found.items()],
    )
    known = {name: value for name, value in found.items() if value is not None and is_real[name]}

    def why(name: str) -> str:
        few = runs.row(f"{FMOE}:capacity={CAPACITIES[0]}")
        score, r = _score(name, few) or 0, few[f"similarity_correlation_{name}"]
        return (
            f"matches are much alike, with a mean similarity of {means[name] or 0:.2f}; tried with {CAPACITIES[0]} "
            f"maps, of {score:.2f}, r is {show(r, 'number')}"
        )

    checks = [correlates(name, value, partial(why, name)) for name, value in known.items()]
    notes = [] if len(known) == 2 else ["embeddings were not recorded, so that semantic similarity tells nothing"]
    return lab.finding(lab.setting(runs), [table], checks, notes)


def correlates(name: str, r: float, why: Why) -> Check:
    """As strongly as the paper's weakest."""
    return rules.within(
        f"{name} similarity goes with hits, as strongly as the paper's weakest",
        f"r, {name}",
        r,
        PAPER_R[0],
        1.0,
        why,
        paper=f"{PAPER_R[0]} to {PAPER_R[1]}",
    )


# -- 9, 10, 11: beside four others ---------------------------------------------------------------------------------


@PAPER.experiment("9", takes=TAKEN)
def overall(lab: Lab) -> Finding:
    """TTFT, TPOT and hit rate beside four systems

    Against DeepSpeed-Inference, Mixtral-Offloading, ProMoE and MoE-Infinity fMoE takes 44, 35, 33, 30 % off TTFT
    and 70, 61, 55, 48 % off TPOT, and hits 147, 11, 34, 63 % more, at d = 3. Its ProMoE is a prototype of the authors'
    own (section 6.1).
    """
    runs = lab.runs(HARDWARE)
    others = runs.rows(systems(lab))
    beside = runs.rows(BESIDE | {name: name for name in ("lru", "oracle")})
    baselines = {label: row for label, row in others.items() if label != AT_3}
    checks = [
        *TTFT.sizes("TTFT is less than that of", others, AT_3, LESS_TTFT),
        *TPOT.sizes("TPOT is less than that of", others, AT_3, LESS_TPOT),
        *HITS.sizes("hits are more than those of", others, AT_3, MORE_HITS),
        *(
            one.best(
                f"at our distance, too, fMoE has the best {one.header}", baselines | {"fmoe": beside["fmoe"]}, "fmoe"
            )
            for one in (TTFT, TPOT, HITS)
        ),
        TPOT.worst(
            "Mixtral-Offloading hits more than the other three, but waiting for its prefetches costs time",
            {label: row for label, row in baselines.items() if label != "on-demand"},
            "mixtral-offloading",
        ),
    ]
    table = table_of("Beside others", others | beside | runs.beside(), TTFT, TPOT, HITS, LOADED)
    return lab.finding(lab.setting(runs), [table], checks, [AS_THEY_RAN])


REQUESTS = 64
MEAN_GAP_S = 2.0
"""Between arrivals that are made up."""
LATENCIES = {"mean": None, "median": 50, "p90": 90}


@PAPER.experiment("10", takes=TAKEN, needs=("prompts",), most=1)
def online(lab: Lab) -> Finding:
    """Latency of requests, online

    64 requests sampled from Azure's trace (arrivals and lengths), with empty stores: the CDF of fMoE's request
    latency lies left of those of ProMoE, MoE-Infinity, Mixtral-Offloading and DeepSpeed for all three models.
    """
    schedules = [Schedule([], *arriving(lab.trace, lab.parted(seed).test, _sample(lab, seed))) for seed in lab.seeds]
    runs = lab.runs_of(schedules, HARDWARE, is_queued=True)
    rows = runs.rows(systems(lab) | BESIDE)
    times = [Metric(header, "s", partial(Row.latency_s, percent=percent)) for header, percent in LATENCIES.items()]
    judged = {label: row for label, row in rows.items() if label not in BESIDE}
    checks = [one.best(f"fMoE has the lowest latency ({one.header})", judged, AT_3) for one in times]
    num_cut = sum(one.num_cut for one in schedules)
    num = rows[AT_3]["requests"]
    note = f"{num} requests; {num_cut} of them are shorter than their arrivals say: the trace holds no more"
    if lab.arrivals is None:
        note = f"{num} requests; arrivals are made up: {MEAN_GAP_S} s apart in the mean, exponential; --arrivals takes "
        note += "recorded ones"
    table = table_of("Latency of requests", rows | runs.beside(), *times, HITS)
    return lab.finding(f"{lab.setting(runs)}; online", [table], checks, [note])


def _sample(lab: Lab, seed: int) -> Arrivals:
    num = REQUESTS // (6 if lab.options.quick else 1)
    dice, given = np.random.default_rng(seed), lab.arrivals
    if given is None:
        times = np.cumsum(dice.exponential(MEAN_GAP_S * 1e9, num)).astype(np.int64)
        most = np.full(num, 1 << 30, np.int64)
        return Arrivals(times - times[0], most, most)
    chosen = np.sort(dice.choice(len(given), min(num, len(given)), replace=False))
    times = given.times_ns[chosen]
    return Arrivals(times - times[0], given.prompt_tokens[chosen], given.output_tokens[chosen])


BUDGETS = ("10%", "25%", "50%", "75%")


LESS_AT_LEAST = {"on-demand": 0.32, "mixtral-offloading": 0.24, STRIDE: 0.18, ARTIFACT: 0.18}


@PAPER.experiment("11", takes=("system", "hardware"), most=1)
def budgets(lab: Lab) -> Finding:
    """TPOT by memory for experts

    From 6 to 96 GB fMoE is fastest; at 6 GB it takes 32, 24, 18, 18 % off the TPOT of DeepSpeed-Inference,
    Mixtral-Offloading, ProMoE and MoE-Infinity. DeepSpeed is slowest.
    """
    runs, named = lab.runs(HARDWARE), systems(lab)
    found = {memory: runs.rows(named, memory) for memory in BUDGETS}
    ours = {memory: runs.row("fmoe", memory) for memory in BUDGETS}
    told, slower = {}, []  # the second: pairs of which more memory is slower
    for name, (less, more) in product(named, pairwise(BUDGETS)):
        rows = {memory: found[memory][name] for memory in (less, more)}
        told[f"{name}, {more} of memory"] = TPOT.told(rows, more, slack=0.01)
        slower += [rows.values()] * (rows[more].tpot_s > rows[less].tpot_s * 1.01)
    checks = [
        TPOT.everywhere("fMoE is fastest at every budget", found, AT_3),
        TPOT.everywhere(
            "and at our distance",
            {
                memory: {"fmoe": ours[memory]} | {k: row for k, row in rows.items() if k != AT_3}
                for memory, rows in found.items()
            },
            "fmoe",
        ),
        rules.everywhere(
            "every system gets faster with memory",
            told,
            "TPOT falls from budget to budget, to 1 %",
            lambda: of_steps(*slower[0]),
            unit="ms",
        ),
        *TPOT.sizes("at the least memory TPOT is less than that of", found[BUDGETS[0]], AT_3, LESS_AT_LEAST),
        TPOT.worst("at the least memory DeepSpeed is slowest", found[BUDGETS[0]], "on-demand"),
    ]
    table = grid(
        "TPOT",
        {memory: rows | {"fmoe": ours[memory]} | runs.beside(memory) for memory, rows in found.items()},
        TPOT,
        "memory",
    )
    return lab.finding(lab.setting(runs, ""), [table], checks, [AS_THEY_RAN])


# -- 12: what predicts, and what goes ------------------------------------------------------------------------------

TRACKING = {
    "speculate": f"fmoe:prediction=lookahead:eviction=lfu:distance={DISTANCE}",
    "hit count": f"{COUNTS}:distance={DISTANCE}",
    "map (T)": f"fmoe:semantic=no:select=top-k:distance={DISTANCE}",
    "map (T+S)": f"fmoe:select=top-k:distance={DISTANCE}",
    "map (T+S+delta)": f"fmoe:distance={DISTANCE}",
}
NAMED = Metric("named, of needed", "share", lambda row: row["recall"], lowest=False)


@PAPER.experiment("12a", "12", takes=TAKEN, most=1)
def tracking(lab: Lab) -> Finding:
    """Hit rate by predictor

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
        HITS.ranked("T < T+S < T+S+delta", maps, why, strict=True),
        HITS.better("full maps hit more than speculation", rows, "map (T+S+delta)", "speculate"),
    ]
    return lab.finding(
        lab.setting(runs), [table_of(f"12a, d = {DISTANCE}", rows | runs.beside(), HITS, NAMED, RIGHT)], checks
    )


@PAPER.experiment("12b", takes=TAKEN)
def eviction(lab: Lab) -> Finding:
    """Hit rate by eviction policy

    LRU performs poorly, LFU hits more, fMoE's 1/(p x freq) most, for all three models.
    """
    runs = lab.runs(HARDWARE)
    rows = runs.rows({name: f"fmoe:eviction={name}:distance={DISTANCE}" for name in ("lru", "lfu", "fmoe")})
    loaded = LOADED.values(rows)

    def why() -> str:
        said = []
        if loaded["fmoe"] > loaded["lfu"]:
            said.append(f"p x freq loads {loaded['fmoe'] / loaded['lfu']:.3f}x what freq alone does")
        if loaded["lfu"] > loaded["lru"]:
            said.append(f"freq loads {loaded['lfu'] / loaded['lru']:.3f}x what recency does")
        tried = HITS.values(runs.rows({name: f"{row.system}:scope=layer" for name, row in ordered.items()}))
        hits = ", ".join(f"{name} {show(value, 'share')}" for name, value in tried.items())
        return "; ".join([*said, f"tried with a cache for each layer, hits are {hits}"])

    ordered = {name: rows[name] for name in ("fmoe", "lfu", "lru")}
    checks = [
        HITS.ranked("fMoE > LFU > LRU", ordered, why),
        LOADED.ranked("bytes loaded: fMoE < LFU < LRU", ordered, why),
    ]
    title = f"12b, one cache over all layers, the same prediction, d = {DISTANCE}"
    return lab.finding(
        lab.setting(runs), [table_of(title, rows | runs.beside(), HITS, TPOT, LOADED, key="what goes")], checks
    )


# -- 13: by prefetch distance ----------------------------------------------------------------------------------------


@PAPER.experiment("13", takes=("hardware", "memory"), most=1)
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
        at_once = lab.runs_of(lab.schedules(), HARDWARE, predicting="inline").row(near.system)
        begins = (
            f"at d = 1 {near['predictions_late']} predictions come late and {near['timeliness']:.1%} of what is needed "
            f"of the prefetched is there in time, at d = {DISTANCES[-1]} {far['predictions_late']} and "
            f"{far['timeliness']:.1%}; tried with matching that takes no time, d = 1 has "
            f"{show(at_once.tpot_s / near.tpot_s, 'x')} of its TPOT"
        )
        if at != DISTANCES[0]:
            return begins
        ends = f"what a longer lead gains is less than what wrong guesses cost: {of_time(far, near)}"
        return f"{begins}; {ends}"

    named = {f"d={d}": row for d, row in found.items()}
    checks = [
        rules.between("TPOT is a U: least between the ends", TPOT.values(named), why, unit="ms"),
        *(
            one.better(f"{one.header} at d = 3 is less than at d = {end}", named, f"d={DISTANCE}", f"d={end}", why)
            for one in (TTFT, TPOT)
            for end in (DISTANCES[0], DISTANCES[-1])
        ),
    ]
    table = table_of("fMoE by prefetch distance", found, TTFT, TPOT, HITS, LATE, IN_TIME, key="d")
    return lab.finding(lab.setting(runs), [table], checks)


# -- 14a: how many maps are kept, and what that is worth --------------------------------------------------------------

CAPACITIES = (125, 250, 500, 1000, 1500, 2000)


def _score(kind: str, row: Row) -> float | None:
    found: float | None = row["predictor"].get(f"{kind}_score")
    return found


@PAPER.experiment("14a", "14", takes=("hardware", "memory"), most=1)
def capacity(lab: Lab) -> Finding:
    """Similarity by capacity of the map store

    Mean semantic and trajectory similarity rise steeply below 1K maps and little beyond (axis 0.8 to 1.0, 500 to
    1500 maps).
    """
    runs = lab.runs(HARDWARE)
    found = {num: runs.row(f"{FMOE}:capacity={num}") for num in CAPACITIES}
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
    return lab.finding(lab.setting(runs), [table], checks)


# -- 14b: several requests at once ---------------------------------------------------------------------------------

SIZES = (1, 2, 3, 4)


@PAPER.experiment("14b", takes=TAKEN, most=1)
def batches(lab: Lab) -> Finding:
    """TTFT and TPOT by batch size

    From batch 1 to 4 (Mixtral-8x7B) fMoE has the lowest TTFT and TPOT in most cases, beside Mixtral-Offloading,
    ProMoE and MoE-Infinity.
    """
    named = {label: name for label, name in systems(lab).items() if label != "on-demand"}
    runs = {size: batched(lab, HARDWARE, size) for size in SIZES}
    found = {size: one.rows(named) for size, one in runs.items()}
    shown = {size: rows | runs[size].beside() for size, rows in found.items()}
    tables, cases = [grid("Time of a decode pass", shown, TPOT, "batch")], {}
    for metric in (TPOT, *[TTFT] * lab.subject.has_prompts):
        for size, rows in found.items():
            cases[f"{metric.header}, {size}"] = metric.told(rows, AT_3)
    if lab.subject.has_prompts:
        tables.append(grid("Prompts", shown, TTFT, "batch"))
    last = found[SIZES[-1]]

    def why() -> str:
        fastest = min((row for label, row in last.items() if label != AT_3), key=lambda row: row.tpot_s)
        return f"at batch {SIZES[-1]}: {of_time(last[AT_3], fastest)}"

    rule = "lowest TTFT or TPOT in more than half of the cases"
    checks = [
        rules.everywhere("fMoE is fastest in most cases", cases, rule, why, unit="ms", mostly=True),
        rules.everywhere(
            "a pass takes longer with more requests",
            {
                name: rules.compare(("4", "1"), {"4": last[name].tpot_s, "1": found[1][name].tpot_s}, lowest=False)
                for name in named
            },
            "TPOT at batch 4 above that at 1",
            lambda: of_steps(*(found[size][name] for name in named for size in (1, 4))),
        ),
    ]
    return lab.finding(lab.setting(runs[1]), tables, checks, ["requests of a batch begin together"])


# -- 15: what an iteration's time goes to --------------------------------------------------------------------------

MOST_ADDED = 0.05
SAME = 0.02


def adds_little(waiting: float, asking: float, why: Why) -> Check:
    """What is not asynchronous, as shares of an iteration: the paper's excludes matching, prefetching and updating."""
    return rules.below(
        "what is not asynchronous (loading on demand, asking for experts) adds less than 5 % to an iteration",
        {"waiting and asking": waiting + asking, "5 %": MOST_ADDED},
        why,
        unit="share",
        paper="less than 5 %, 30 ms of 100 to 500",
    )


@PAPER.experiment("15", takes=("hardware", "memory"))
def breakdown(lab: Lab) -> Finding:
    """Latency breakdown of an iteration

    Matching, prefetching and updating are asynchronous; without them all other operations (collecting context,
    loading on demand) add less than 30 ms, 5 % of an iteration (100 to 500 ms), for all three models.
    """
    runs = lab.runs(HARDWARE)
    row = runs.row(FMOE)
    num, total = len(row.passes_s), float(row.passes_s.sum())
    waiting, asking = float(row.waiting_s.sum()), float(row.asking_s.sum())
    matching = row.predicting_s.get("begin", 0.0) + row.predicting_s.get("router", 0.0)
    parts = {
        "inference: computing": (total - waiting - asking, "in the pass"),
        "expert load: waiting for experts": (waiting, "in the pass"),
        "asking for experts": (asking, "in the pass"),
        "map match": (matching, "beside it"),
        "map update": (row.predicting_s.get("update", 0.0), "beside it"),
        "link busy: loads and prefetches": (float(row.loading_s.sum()), "beside it"),
    }
    rows = [(what, where, spent / num, spent / total) for what, (spent, where) in parts.items()]
    free = lab.runs_of(lab.schedules(), HARDWARE, predicting="inline").row(FMOE)

    def why() -> str:
        assert row.on_faster_link is not None
        waits, faster, foretold = (
            show(float(one.waiting_s.sum() / one.passes_s.sum()), "share")
            for one in (row, row.on_faster_link(), runs.row("oracle"))
        )
        return (
            f"for what is not there in time the pass waits, {waits}; {ON_FASTER_LINK} {faster}; with all foretold "
            f"(oracle) {foretold}"
        )

    checks = [
        rules.same(
            "matching and updating, which are asynchronous, add nothing to an iteration",
            {"TPOT": row.tpot_s, "TPOT if they took no time": free.tpot_s},
            f"{row['predictions_late']} predictions were late: matching takes longer than layers beside it",
            margin=SAME,
            unit="ms",
            paper="nothing",
        ),
        adds_little(row.mean(row.waiting_s, weights=row.passes_s), row.mean(row.asking_s, weights=row.passes_s), why),
    ]
    note = (
        "simulated: matching is charged what it was measured to read and compute; collecting context is not modelled "
        "(the engine keeps references in the pass, and copies them in the matcher's thread)"
    )
    note += "" if asking else f", nor what asking for experts takes: the profile {runs.hardware} has no time for it"
    columns = {"": "", "where": "", "an iteration": "ms", "of its time": "share"}
    return lab.finding(lab.setting(runs), [FindingTable.of("Of all iterations", columns, rows)], checks, [note])


# -- 16: what the maps take -------------------------------------------------------------------------------------------

MODELS = ("mixtral-8x7b", "qwen1.5-moe", "phi-3.5-moe")
STORES = (1000, 2000, 4000, 8000, 16000, 32000)
MOST_NBYTES = 200e6


@PAPER.experiment("16", most=1)
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
