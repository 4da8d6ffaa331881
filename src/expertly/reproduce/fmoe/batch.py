"""Figure 14b: several requests at once."""

from __future__ import annotations

from expertly.reproduce import reasons, rules
from expertly.reproduce.batches import batched
from expertly.reproduce.experiment import Experiment
from expertly.reproduce.finding import Cell, Finding, FindingTable
from expertly.reproduce.lab import Lab

HARDWARE = "rtx3090"
SIZES = (1, 2, 3, 4)
SYSTEMS = ("fmoe", "mixtral-offloading", "promoe", "moe-infinity-lfu")


def _run(lab: Lab) -> Finding:
    found = {size: {name: batched(lab, HARDWARE, size).row(name) for name in SYSTEMS} for size in SIZES}
    columns = {"batch": ""} | {f"TPOT, {row.label}": "ms" for row in found[1].values()}
    rows: list[tuple[Cell, ...]] = [(size, *(row.tpot_s for row in ones.values())) for size, ones in found.items()]
    tables = [FindingTable.of("Time of a decode pass", columns, rows)]
    cases = {
        f"TPOT, {size}": _is_best({name: row.tpot_s for name, row in ones.items()}) for size, ones in found.items()
    }
    if lab.subject.has_prompts:
        columns = {"batch": ""} | {f"TTFT, {row.label}": "ms" for row in found[1].values()}
        tables.append(
            FindingTable.of(
                "Prompts", columns, [(size, *(one["ttft_s"] for one in ones.values())) for size, ones in found.items()]
            )
        )
        cases |= {
            f"TTFT, {size}": _is_best({name: row["ttft_s"] for name, row in ones.items()})
            for size, ones in found.items()
        }

    def why() -> str:
        ones = found[SIZES[-1]]
        fastest = min((row for row in ones.values() if row.system != "fmoe"), key=lambda row: row.tpot_s)
        return f"at batch {SIZES[-1]}: {reasons.of_time(ones['fmoe'], fastest)}"

    held = sum(cases.values())
    checks = [
        rules.within(
            "fMoE is fastest in most cases", "share of cases", held / len(cases), 0.5, 1.0, unit="share", why=why
        ),
        rules.everywhere(
            "a pass takes longer with more requests",
            {name: found[4][name].tpot_s > found[1][name].tpot_s for name in SYSTEMS},
            "TPOT at batch 4 above that at 1",
            lambda: reasons.of_steps(*(found[size][name] for name in SYSTEMS for size in (1, 4))),
        ),
    ]
    runs = batched(lab, HARDWARE, 1)
    return lab.finding(lab.setting(runs, "25%"), tables, checks, ["requests of a batch begin together"])


def _is_best(times: dict[str, float]) -> bool:
    return times["fmoe"] <= min(times.values())


EXPERIMENT = Experiment(
    "fmoe",
    ("14b",),
    "TTFT and TPOT by batch size",
    "From batch 1 to 4 (Mixtral-8x7B) fMoE has the lowest TTFT and TPOT in most cases, beside Mixtral-Offloading, "
    "ProMoE and MoE-Infinity.",
    _run,
    most=1,
)
