"""Figure 12: what predicts, and what goes."""

from __future__ import annotations

from expertly.reproduce import reasons, rules
from expertly.reproduce.experiment import Experiment
from expertly.reproduce.finding import Finding, FindingTable
from expertly.reproduce.lab import Lab, Row

HARDWARE = "rtx3090"
DISTANCE = 3
TRACKING = {
    "hit count": f"fmoe:prediction=counts:eviction=lfu:distance={DISTANCE}",
    "map (T)": f"fmoe:semantic=no:select=top-k:distance={DISTANCE}",
    "map (T+S)": f"fmoe:select=top-k:distance={DISTANCE}",
    "map (T+S+delta)": f"fmoe:distance={DISTANCE}",
}
SPECULATE = f"fmoe:prediction=lookahead:eviction=lfu:distance={DISTANCE}"
EVICTION = {name: f"fmoe:eviction={name}:distance={DISTANCE}" for name in ("lru", "lfu", "fmoe")}


def _tracking(lab: Lab) -> Finding:
    runs = lab.runs(HARDWARE)
    rows = {label: runs.row(name) for label, name in {"speculate": SPECULATE, **TRACKING}.items()}
    columns = {"": "", "hit rate": "share", "named, of needed": "share", "right, of named": "share"}
    cells = [
        (label + (" (modelled)" if row.is_modelled else ""), row.hit_rate, row["recall"], row["prediction_accuracy"])
        for label, row in rows.items()
    ]
    hits = {label: row.hit_rate for label, row in rows.items()}
    steps = {label: hits[label] for label in TRACKING if label != "hit count"}
    facts = rows["map (T+S+delta)"]["predictor"]
    checks = [
        rules.best(
            "the request's hit counts are worst",
            hits,
            "hit count",
            lowest=True,
            unit="share",
            why=lambda: reasons.of_hits(rows["hit count"], rows[min(hits, key=lambda key: hits[key])]),
        ),
        rules.ranked(
            "T < T+S < T+S+delta",
            dict(reversed(steps.items())),
            lowest=False,
            unit="share",
            slack=0.0005,
            why=lambda: (
                f"matches are sure (mean similarity {facts.get('trajectory_score') or 0:.2f}), so that delta adds few "
                "experts"
                + (
                    ""
                    if lab.trace.is_real("embedding")
                    else ", and this trace's embeddings were not recorded, so S has nothing real to match"
                )
            ),
        ),
        rules.compared(
            "full maps hit more than speculation",
            ("map (T+S+delta)", hits["map (T+S+delta)"]),
            ("speculate", hits["speculate"]),
            above=True,
            unit="share",
            why=lambda: reasons.of_hits(rows["map (T+S+delta)"], rows["speculate"]),
        ),
    ]
    return lab.finding(lab.setting(runs, "25%"), [FindingTable.of(f"12a, d = {DISTANCE}", columns, cells)], checks)


def _eviction(lab: Lab) -> Finding:
    runs = lab.runs(HARDWARE)
    rows = {label: runs.row(name) for label, name in EVICTION.items()}
    columns = {"what goes": "", "hit rate": "share", "TPOT": "ms", "loaded": "GiB"}
    cells = [(label, row.hit_rate, row.tpot_s, row["bytes_loaded"]) for label, row in rows.items()]
    hits = {label: rows[label].hit_rate for label in ("fmoe", "lfu", "lru")}
    checks = [
        rules.ranked(
            "fMoE > LFU > LRU",
            hits,
            lowest=False,
            unit="share",
            why=lambda: _why_not(lab, rows),
        ),
        rules.ranked(
            "and so many bytes",
            {label: rows[label]["bytes_loaded"] for label in ("fmoe", "lfu", "lru")},
            lowest=True,
            unit="GiB",
            why=lambda: _why_not(lab, rows),
        ),
    ]
    table = FindingTable.of(f"12b, one cache over all layers, the same prediction, d = {DISTANCE}", columns, cells)
    return lab.finding(lab.setting(runs, "25%"), [table], checks)


def _why_not(lab: Lab, rows: dict[str, Row]) -> str:
    said = []
    if rows["fmoe"]["bytes_loaded"] > rows["lfu"]["bytes_loaded"]:
        said.append(
            f"p x freq loads {rows['fmoe']['bytes_loaded'] / rows['lfu']['bytes_loaded']:.3f}x what freq alone does"
        )
        if not lab.trace.has("probs"):
            said.append("imported routing has the chosen experts' weights alone, so that p tells nothing of the others")
    if rows["lfu"]["bytes_loaded"] > rows["lru"]["bytes_loaded"]:
        said.append("which of recency and frequency is better is the workload's: here it is recency")
    return "; ".join(said) or "differences are a fraction of a point of hits, and of bytes in the order of the paper"


TRACK = Experiment(
    "fmoe",
    ("12a", "12"),
    "Hit rate by what predicts",
    "Hit count is worst; Map (T) < Map (T+S) < Map (T+S+delta), which is best; speculation lies between at d = 3.",
    _tracking,
    most=1,
)
EVICT = Experiment(
    "fmoe",
    ("12b",),
    "Hit rate by what goes",
    "LRU performs poorly, LFU hits more, fMoE's 1/(p x freq) most, for all three models.",
    _eviction,
)
