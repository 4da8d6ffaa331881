"""What is ours: the prefetch filter, in the simulator, and what is kept between runs, on the engine."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from expertly.lab.papers import findings as rules
from expertly.lab.papers.findings import Cell, Finding, FindingTable, experiment
from expertly.lab.papers.metrics import of_time
from expertly.lab.papers.runs import SPLIT, CannotRun, Lab
from expertly.sim.schedule import Selection, make_schedule
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


@experiment("expertly:filter")
def prefetch_filter(lab: Lab) -> Finding:
    """Prefetching behind the filter, beside all of it and none

    No paper filters its prefetches by how often they were right.
    """
    cells: list[tuple[Cell, ...]] = []
    cases, slower = {}, []
    for machine in MACHINES:
        runs = lab.runs(machine)
        for family, (off, on) in FAMILIES.items():
            if lab.subject.fitted(on)[1]:  # its prediction would be modelled
                continue
            without, ahead, gated = (runs.row(name) for name in (off, on, f"{on}:gate=confidence"))
            better = min(without, ahead, key=lambda row: row.tpot_s)
            ratio = gated.tpot_s / better.tpot_s
            cells.append((f"{machine}, {family}", without.tpot_s, ahead.tpot_s, gated.tpot_s, ratio))
            cases[f"{machine}, {family}"] = ratio <= NEAR
            slower += [f"{machine}: {of_time(gated, better)}"] * (ratio > NEAR)
    columns = {"": "", "no prefetch": "ms", "all of it": "ms", "gate=confidence": "ms", "of the better": "x"}
    check = rules.everywhere(
        "behind the filter prefetching is about as fast as the better of all of it and none",
        cases,
        f"TPOT at most {NEAR} times that of the better",
        lambda: "; ".join(slower),
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
    schedule = make_schedule(lab.trace, Selection(split=SPLIT, seed=lab.seed))
    cut = 4 if lab.quick else 1
    num, learns = REQUESTS // cut, [learn // cut for learn in LEARN]
    earlier, later = _fed(lab, schedule.training[: learns[-1]]), _fed(lab, schedule.test[:num])
    plain = _loaded(later, "lru", "off")
    found = {}
    for learn in learns:
        with tempfile.TemporaryDirectory() as folder:
            file = str(Path(folder) / "demo.reuse")
            if learn:
                _loaded(earlier[:learn], "expertly", file)
            found[learn] = _loaded(later, "expertly", file)
    rows = {"lru": plain, **{f"expertly, {learn} requests before": one for learn, one in found.items()}}
    check = rules.below(
        "what earlier processes learned saves loads in the next",
        {f"{learns[-1]} requests before": found[learns[-1]][0], "none": found[0][0]},
        f"{num} requests are enough to learn what {learns[-1]} before them taught",
        unit="MB",
    )
    cells = [(name, nbytes, nbytes / plain[0], hits) for name, (nbytes, hits) in rows.items()]
    columns = {"": "", "loaded a decode step": "MB", "of lru": "x", "hit rate": "share"}
    setting = f"the engine, demo model, 25 %; {num} requests of {TOKENS} tokens at most, seed {lab.seed}"
    return lab.finding(setting, [FindingTable.of("With a file that earlier processes left", columns, cells)], [check])


def _fed(lab: Lab, spans: Sequence[RowRange]) -> list[tuple[list[int], int]]:
    """(token ids, how many of them are the prompt) of each."""
    found = []
    for span in spans:
        stop = span.first_row + span.num_rows
        num_prompt = int(lab.trace.rows("is_prefill", span.first_row, stop).sum())
        ids = lab.trace.rows("token", span.first_row, min(stop, span.first_row + num_prompt + TOKENS))
        found.append((ids.tolist(), num_prompt))
    return found


def _loaded(requests: Sequence[tuple[list[int], int]], system: str, maps: str) -> tuple[float, float]:
    """Bytes a decode step, and the hit rate, of a model that is loaded for it."""
    from expertly import api
    from expertly.lab.playing import feed

    model, _ = api.load(None, memory="25%", codec="none", device="cpu", system=system, learned=maps)
    try:
        for tokens, num_prompt in requests:
            feed(model, tokens, num_prompt)
        decode = api.stats(model).as_dict()["phases"]["decode"]
    finally:
        api.unload(model)
    return decode["bytes_loaded"] / max(1, decode["iterations"]), decode["hit_rate"]
