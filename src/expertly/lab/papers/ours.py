"""What is ours: the prefetch gate, in the simulator, and what is kept between runs, on the engine."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from expertly.lab.papers import findings as rules
from expertly.lab.papers.findings import Cell, Finding, FindingTable, experiment
from expertly.lab.papers.measured import Estimate
from expertly.lab.papers.metrics import of_time
from expertly.lab.papers.runs import CannotRun, Lab
from expertly.sim.schedule import Schedule, make_schedule, with_answer
from expertly.sim.workload import RowRange

FAMILIES = {
    "lookahead": ("lru", "lru:prediction=lookahead"),
    "adapmoe": ("adapmoe:prediction=none", "adapmoe"),
    "token-id": ("lru", "lru:prediction=token-id"),
    "popularity": ("lru", "lru:prediction=popularity"),
    "eam": ("lru", "lru:prediction=eam"),
}
"""Without prefetch, and with it."""
MACHINES = ("rtx3090", "a100", "laptop-nvme")
NEAR = 1.05


@experiment("expertly:gate")
def prefetch_gate(lab: Lab) -> Finding:
    """Prefetching behind the gate, beside all of it and none

    No paper measures whether its prefetches pay while it runs.
    """
    cells: list[tuple[Cell, ...]] = []
    cases, slower = {}, []
    for machine in MACHINES:
        runs = lab.runs(machine)
        for family, (off, on) in FAMILIES.items():
            if lab.subject.fitted(on)[1]:  # its prediction would be modelled
                continue
            without, ahead, gated = (runs.row(name) for name in (off, on, f"{on}:gate=measured"))
            better = min(without, ahead, key=lambda row: row.tpot_s)
            ratio = gated.tpot_s / better.tpot_s
            cells.append((f"{machine}, {family}", without.tpot_s, ahead.tpot_s, gated.tpot_s, ratio))
            values = {"behind the gate": gated.tpot_s, "the better": better.tpot_s}
            one = rules.compare(("behind the gate", "the better"), values, lowest=True, slack=NEAR - 1)
            cases[f"{machine}, {family}"] = one
            slower += [f"{machine}: {of_time(gated, better)}"] * (one.holds is False)
    columns = {"": "", "no prefetch": "ms", "all of it": "ms", "gate=measured": "ms", "of the better": "x"}
    check = rules.everywhere(
        "behind the gate prefetching is about as fast as the better of all of it and none",
        cases,
        f"TPOT at most {NEAR} times that of the better",
        lambda: "; ".join(slower),
        unit="ms",
    )
    return lab.finding(lab.setting(lab.runs(MACHINES[0]), "25%"), [FindingTable.of("TPOT", columns, cells)], [check])


LEARN = (0, 8, 24)
REQUESTS, TOKENS = 8, 48


@experiment("expertly:saved", needs=("token", "prompts"), most=1)
def saved_reuse(lab: Lab) -> Finding:
    """What is kept between runs

    No paper says what its learned state is worth to the next process.
    """
    if lab.trace.manifest.model != "demo":
        raise CannotRun("its tokens are fed to the demo model, and it is of another one")
    cut = 4 if lab.quick else 1
    num, learns = REQUESTS // cut, [learn // cut for learn in LEARN]
    every: dict[str | int, list[tuple[float, float]]] = {}  # by seed
    for seed in lab.seeds:
        schedule = make_schedule(lab.trace, lab.selection(seed))
        earlier, later = schedule.training[: learns[-1]], schedule.test[:num]
        every.setdefault("lru", []).append(_loaded(lab, later, "lru", "off"))
        for learn in learns:
            with tempfile.TemporaryDirectory() as folder:
                file = str(Path(folder) / "demo.reuse")
                if learn:
                    _loaded(lab, earlier[:learn], "expertly", file)
                every.setdefault(learn, []).append(_loaded(lab, later, "expertly", file))
    found = {key: [Estimate.of_seeds(one) for one in zip(*values, strict=True)] for key, values in every.items()}
    plain = found["lru"]
    rows = {f"expertly, {key} requests before" if key != "lru" else "lru": one for key, one in found.items()}
    check = rules.below(
        "what earlier processes learned saves loads in the next",
        {f"{learns[-1]} requests before": found[learns[-1]][0], "none": found[0][0]},
        f"{num} requests are enough to learn what {learns[-1]} before them taught",
        unit="MB",
    )
    cells = [(name, nbytes, nbytes / plain[0], hits) for name, (nbytes, hits) in rows.items()]
    columns = {"": "", "loaded a decode step": "MB", "of lru": "x", "hit rate": "share"}
    setting = f"the engine, demo model, 25 %; {num} requests of {TOKENS} tokens at most, {len(lab.seeds)} seeds"
    return lab.finding(setting, [FindingTable.of("With a file that earlier processes left", columns, cells)], [check])


def _loaded(lab: Lab, spans: Sequence[RowRange], system: str, maps: str) -> tuple[float, float]:
    """Bytes a decode step, and the hit rate, of a model that is loaded for these requests."""
    from expertly import api
    from expertly.lab.playing import feed, recorded_requests

    cut = Schedule([], [with_answer(lab.trace, span, TOKENS) for span in spans])

    model, _ = api.load(None, memory="25%", codec="none", device="cpu", system=system, learned=maps)
    try:
        for one in recorded_requests(lab.trace, cut):
            feed(model, one.tokens, one.num_prompt)
        decode = api.stats(model).as_dict()["phases"]["decode"]
    finally:
        api.unload(model)
    return decode["bytes_loaded"] / max(1, decode["iterations"]), decode["hit_rate"]
