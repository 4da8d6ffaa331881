"""What is ours: the prefetch gate, in the simulator, and what is kept between runs, on the engine."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from expertly.core.geometry import Geometry
from expertly.lab.papers import findings as rules
from expertly.lab.papers.findings import TAKEN, Cell, Finding, FindingTable, Paper, Told
from expertly.lab.papers.measured import Estimate
from expertly.lab.papers.metrics import TPOT, of_time
from expertly.lab.papers.runs import SHORT, CannotRun, Lab, Row, Runs, batched, first_decoded, with_link
from expertly.sim.schedule import Schedule, with_answer
from expertly.sim.workload import RowRange

PAPER = Paper("expertly", "Ours: what no paper shows")

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


@PAPER.experiment("gate", takes=("hardware", "memory"))
def prefetch_gate(lab: Lab) -> Finding:
    """The prefetch gate beside prefetching all and nothing

    No paper measures whether its prefetches pay while it runs.
    """
    cells: list[tuple[Cell, ...]] = []
    cases, slower = {}, []
    for machine in lab.machines(MACHINES):
        runs = lab.runs(machine)
        for family, (off, on) in FAMILIES.items():
            if lab.subject.fitted(on)[1]:  # its prediction would be modelled
                continue
            without, ahead, gated = (runs.row(name) for name in (off, on, f"{on}:gate=measured"))
            better = min(without, ahead, key=lambda row: row.tpot_s)
            ratio = gated.tpot_s / better.tpot_s
            cells.append((f"{machine}, {family}", without.tpot_s, ahead.tpot_s, gated.tpot_s, ratio))
            one = TPOT.told({"behind the gate": gated, "the better": better}, "behind the gate", slack=NEAR - 1)
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
    return lab.finding(lab.setting(lab.runs(MACHINES[0])), [FindingTable.of("TPOT", columns, cells)], [check])


# -- what the order of systems depends on ------------------------------------------------------------------------------

OF_EACH = ("expertly", "fmoe:distance=3", "moe-infinity", "promoe", "moepic", "mixtral-offloading")
MACHINE = "rtx3090"
ASSUMED = "as assumed"
CONTEXTS = (4_096, 32_768)
ASSUMPTIONS: dict[str, dict[str, float]] = {
    ASSUMED: {},
    "launches 4 times as fast": {"launch_ns": 1 / 4},
    "launches 16 times as fast": {"launch_ns": 1 / 16},
    "launches, layers and steps 8 times as fast": {"launch_ns": 1 / 8, "layer_ns": 1 / 8, "iteration_ns": 1 / 8},
    "half of the link": {"link": 1 / 2},
    "twice the link": {"link": 2.0},
    "6 times the link": {"link": 6.0},
}
"""Times of what the profile of the machine assumes, or of its link."""
BATCHES = (2, 4)


@PAPER.experiment("assumptions", takes=TAKEN, most=2, is_long=True)
def assumptions(lab: Lab) -> Finding:
    """Sensitivity of the order of systems to launches, link, batch and context

    No paper says which of its results another machine would turn round.
    """
    machine, schedules = lab.machine(MACHINE), lab.schedules(answer=SHORT)
    found: dict[str, dict[str, Row]] = {}
    for where, times in ASSUMPTIONS.items():
        fixed = {key: round(getattr(machine, key) * by) for key, by in times.items() if key != "link"}
        changed = replace(with_link(machine, times.get("link", 1.0)), name=where, **fixed)
        found[where] = _beside_lru(lab.runs_of(schedules, changed))
    for size in BATCHES:
        found[f"{size} requests at once"] = _beside_lru(batched(lab, MACHINE, size))
    geometry = Geometry(lab.subject.layers)
    for context in CONTEXTS:
        nbytes = context * lab.subject.layers[0].hidden_size  # of a layer's keys and values
        reading_ns = round(nbytes / machine.memory_nbytes_per_s / machine.efficiency * 1e9)
        changed = replace(machine, name=f"context {context}", layer_ns=machine.layer_ns + reading_ns)
        share = lab.share() - 100 * nbytes * geometry.num_layers / geometry.nbytes
        least = 100 * 2 * geometry.layers[0].top_k * geometry.layers[0].expert_nbytes / geometry.nbytes
        where = f"after {context} tokens, {max(share, least):.1f}% for experts"
        found[where] = _beside_lru(lab.runs_of(schedules, changed), f"{max(share, least):.4g}%")
    order = {
        where: {name: TPOT.told({one: rows[one] for one in (name, "lru")}, name, slack=0.0) for name in OF_EACH}
        for where, rows in found.items()
    }
    checks = [
        rules.everywhere(
            f"whether {name} is faster than lru depends on none of these assumptions",
            {where: _as_usual(told[name], order[ASSUMED][name].holds) for where, told in order.items()},
            "on the same side of lru's TPOT as with what is assumed",
            partial(_turned, found, order, name),
            unit="ms",
        )
        for name in OF_EACH
    ]
    others = [name for name in found[ASSUMED] if name != "lru"]
    columns = {"": "", "lru": "ms", **{f"{name}, of lru's": "x" for name in others}}
    cells: list[tuple[Cell, ...]] = [
        (where, rows["lru"].tpot_s, *(rows[name].tpot_s / rows["lru"].tpot_s for name in others))
        for where, rows in found.items()
    ]
    notes = [
        "a context's keys and values take as many bytes a token and layer as the hidden state has numbers (gpt-oss: "
        "0.7 of it), are read once a step, and leave so much less for experts",
        f"of answers at most {SHORT} tokens, so that they are of more requests",
    ]
    setting = lab.setting(lab.runs_of(schedules, machine))
    return lab.finding(setting, [FindingTable.of("TPOT", columns, cells)], checks, notes)


def _beside_lru(runs: Runs, memory: str | None = None) -> dict[str, Row]:
    return runs.rows(("lru", *OF_EACH), memory) | runs.beside(memory)


def _as_usual(told: Told, usual: bool | None) -> Told:
    return told._replace(holds=None if None in (told.holds, usual) else told.holds is usual)


def _turned(found: Mapping[str, Mapping[str, Row]], order: Mapping[str, Mapping[str, Told]], name: str) -> str:
    """Where it is the other way round, and what of."""
    usual = order[ASSUMED][name].holds
    where = next(where for where, told in order.items() if told[name].holds is (not usual))
    return f"{where}: {of_time(found[where][name], found[where]['lru'])}"


# -- what is kept between runs -----------------------------------------------------------------------------------------

LEARN = (0, 8, 24)
TOKENS = 48


@PAPER.experiment("saved", takes=("memory",), needs=("token", "prompts"), most=1)
def saved_reuse(lab: Lab) -> Finding:
    """What is kept between runs

    No paper says what its learned state is worth to the next process.
    """
    if lab.trace.manifest.model != "demo":
        raise CannotRun("its tokens are fed to the demo model, and it is of another one")
    cut = 4 if lab.options.quick else 1
    learns, nums = [learn // cut for learn in LEARN], []
    every: dict[str | int, list[tuple[float, float]]] = {}  # by seed
    for seed in lab.seeds:
        schedule = lab.parted(seed)
        earlier = [with_answer(lab.trace, span, TOKENS) for span in schedule.training[: learns[-1]]]
        answers = [with_answer(lab.trace, span, TOKENS) for span in schedule.test]
        later = first_decoded(lab.trace, answers, lab.tokens_of_seed)
        nums.append(len(later))
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
        f"{min(nums)} requests are enough to learn what {learns[-1]} before them taught",
        unit="MB",
    )
    cells = [(name, nbytes, nbytes / plain[0], hits) for name, (nbytes, hits) in rows.items()]
    columns = {"": "", "loaded a decode step": "MB", "of lru": "x", "hit rate": "share"}
    each = ", ".join(map(str, nums))
    setting = f"the engine, demo model, {lab.memory()}; {each} requests (by seed) of {TOKENS} tokens at most"
    return lab.finding(setting, [FindingTable.of("With a file that earlier processes left", columns, cells)], [check])


def _loaded(lab: Lab, spans: Sequence[RowRange], system: str, maps: str) -> tuple[float, float]:
    """Bytes a decode step, and the hit rate, of a model that is loaded for these requests."""
    from expertly import api
    from expertly.lab.playing import feed, recorded_requests

    model, _ = api.load(None, memory=lab.memory(), codec="none", device="cpu", system=system, learned=maps)
    try:
        for one in recorded_requests(lab.trace, Schedule([], [*spans])):
            feed(model, one.tokens, one.num_prompt)
        decode = api.stats(model).as_dict()["phases"]["decode"]
    finally:
        api.unload(model)
    return decode["bytes_loaded"] / max(1, decode["iterations"]), decode["hit_rate"]
