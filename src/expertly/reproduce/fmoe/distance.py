"""Figures 4 and 13: hit rate and time by how many layers ahead is prefetched."""

from __future__ import annotations

from expertly.reproduce import reasons, rules
from expertly.reproduce.experiment import Experiment
from expertly.reproduce.finding import Finding, FindingTable
from expertly.reproduce.lab import Lab, Row

HARDWARE = "rtx3090"
COUNTS = "fmoe:prediction=counts:eviction=lfu"
DISTANCES = (1, 2, 3, 4, 5, 6)


def _hits(lab: Lab) -> Finding:
    runs = lab.runs(HARDWARE)
    maps = {d: runs.row(f"fmoe:select=top-k:distance={d}") for d in DISTANCES}
    counts = {d: runs.row(f"{COUNTS}:distance={d}") for d in DISTANCES}
    columns = {"d": "", "maps, K experts": "share", "of these right": "share", "request counts": "share"}
    columns["of these right, counts"] = "share"
    rows = [
        (d, maps[d].hit_rate, maps[d]["prediction_accuracy"], counts[d].hit_rate, counts[d]["prediction_accuracy"])
        for d in DISTANCES
    ]
    first, last = DISTANCES[0], DISTANCES[-1]
    checks = [
        rules.monotonic(
            "hit rate falls with the distance, with maps",
            {f"d={d}": row.hit_rate for d, row in maps.items()},
            rises=False,
            unit="share",
            slack=0.01,
            why=lambda: (
                "the nearest distances leave less time to load: of what is needed of the prefetched "
                + ", ".join(f"{maps[d]['timeliness']:.1%} (d = {d})" for d in DISTANCES)
                + " is there in time, while what is named gets less right"
            ),
        ),
        rules.everywhere(
            "maps (fine-grained) hit more than counts (coarse-grained) at every distance",
            {f"d={d}": _is_finer(maps[d], counts[d]) for d in DISTANCES},
            "hit rate of maps > of request counts",
            lambda: reasons.of_hits(
                *next((maps[d], counts[d]) for d in DISTANCES if not _is_finer(maps[d], counts[d]))
            ),
        ),
        rules.compared(
            "and lose less by distance",
            ("maps lose", maps[first].hit_rate - maps[last].hit_rate),
            ("counts lose", counts[first].hit_rate - counts[last].hit_rate),
            above=False,
            unit="share",
            why=lambda: (
                "counts of the request are the same at every distance, so they have nothing to lose: they are right in "
                f"{counts[first]['prediction_accuracy']:.1%} of cases at d = {first} and in "
                f"{counts[last]['prediction_accuracy']:.1%} at d = {last}; maps in "
                f"{maps[first]['prediction_accuracy']:.1%} and {maps[last]['prediction_accuracy']:.1%}"
            ),
        ),
    ]
    return lab.finding(lab.setting(runs, "25%"), [FindingTable.of("Hit rate of decode", columns, rows)], checks)


def _is_finer(maps: Row, counts: Row) -> bool:
    return maps.hit_rate > counts.hit_rate


def _times(lab: Lab) -> Finding:
    runs = lab.runs(HARDWARE)
    found = {d: runs.row(f"fmoe:distance={d}") for d in DISTANCES}
    columns = {
        "d": "",
        "TTFT": "ms",
        "TPOT": "ms",
        "hit rate": "share",
        "late predictions": "",
        "there in time": "share",
    }
    rows = [
        (d, row["ttft_s"], row.tpot_s, row.hit_rate, row["predictions_late"], row["timeliness"])
        for d, row in found.items()
    ]
    tpots = {f"d={d}": row.tpot_s for d, row in found.items()}
    at = min(found, key=lambda d: found[d].tpot_s)
    checks = [
        rules.between(
            "TPOT is a U: least between the ends", tpots, lowest=True, unit="ms", why=lambda: _why_no_u(found, at)
        ),
        rules.near_best(
            "d = 3 is best, or near it",
            tpots,
            "d=3",
            lowest=True,
            unit="ms",
            slack=0.02,
            why=lambda: _why_no_u(found, at),
        ),
    ]
    return lab.finding(lab.setting(runs, "25%"), [FindingTable.of("fMoE by prefetch distance", columns, rows)], checks)


def _why_no_u(found: dict[int, Row], at: int) -> str:
    near, far = found[DISTANCES[0]], found[DISTANCES[-1]]
    begins = (
        f"at d = 1 {near['predictions_late']} predictions come late and {near['timeliness']:.1%} of what is needed of "
    )
    begins += (
        f"the prefetched is there in time, at d = {DISTANCES[-1]} {far['predictions_late']} and {far['timeliness']:.1%}"
    )
    ends = "what a longer lead gains is less than what wrong guesses cost: " + reasons.of_time(far, near)
    if at == DISTANCES[0]:
        return f"matching is fast here, so a distance of 1 hides it: {begins}; {ends}"
    return begins


HITS = Experiment(
    "fmoe",
    ("4",),
    "Hit rate by prefetch distance, maps against request counts",
    "Hit rates fall as the distance grows (axis 0 to 30 layers); fine-grained (iteration-level) offloading hits "
    "significantly more than coarse-grained at every distance, for Mixtral-8x7B, Qwen1.5-MoE and Phi-3.5-MoE.",
    _hits,
    most=1,
)
TIMES = Experiment(
    "fmoe",
    ("13",),
    "TTFT and TPOT by prefetch distance",
    "Below d = 3 matching and prefetching are not hidden, above it hit rates fall: latency is least near d = 3, for "
    "all three models.",
    _times,
    most=1,
)
