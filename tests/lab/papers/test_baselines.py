"""Baselines of the papers that are not systems of ours: what their times must be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from expertly.core.geometry import Geometry
from expertly.lab.papers import moe_infinity, moepic, ours, promoe
from expertly.lab.papers.findings import FAILS, HOLDS, Finding
from expertly.lab.papers.measured import Estimate
from expertly.lab.papers.runner import find_experiment
from expertly.lab.papers.runs import Lab, Row, Runs
from expertly.sim.study import Memory


@pytest.mark.parametrize("codebase", promoe.CODEBASES)
def test_layers_that_all_stay_take_what_the_simulator_says_of_all_experts(lab: Lab, codebase: str) -> None:
    row, resident = promoe.whole_layers(lab, codebase, "100%"), promoe.runs_on(lab, codebase).row("resident", "100%")
    assert row.tpot_s == pytest.approx(resident.tpot_s) and row.ttft_s == pytest.approx(resident.ttft_s)
    assert row.waiting(True) == 0.0


def test_layers_that_transformers_moves_take_the_time_of_their_bytes_more(lab: Lab) -> None:
    """Half of 8 layers stay; each of the others waits for attention's weights (none here) and 2 experts."""
    row, resident = promoe.whole_layers(lab, "transformers", "50%"), lab.runs(promoe.HARDWARE).row("resident", "100%")
    machine, expert = promoe.on(lab, "transformers"), lab.subject.layers[0].expert_nbytes
    each_ns = machine.link.latency_ns + machine.link.occupies_ns(0) + 2 * machine.link.occupies_ns(expert)
    assert row.tpot_s - resident.tpot_s == pytest.approx(4 * each_ns / 1e9)
    assert row.waiting(True) == pytest.approx(4 * each_ns / 1e9 / row.tpot_s)


def test_layers_that_llama_cpp_computes_on_the_processor_wait_for_nothing_and_are_slower_to_compute(lab: Lab) -> None:
    some, few = (promoe.whole_layers(lab, "llama.cpp", memory) for memory in ("75%", "25%"))
    resident = promoe.runs_on(lab, "llama.cpp").row("resident", "100%")
    assert some.waiting(True) == few.waiting(True) == 0.0
    assert few.tpot_s - resident.tpot_s == pytest.approx(3 * (some.tpot_s - resident.tpot_s), rel=1e-3)
    assert few.tpot_s > some.tpot_s > resident.tpot_s


def test_pages_are_more_bytes_than_experts_and_each_is_a_fault(lab: Lab) -> None:
    """An expert of 8 MiB in 2 matrices is 4 pages, and one more for each matrix."""
    (link,) = {study.hardware.link for study in promoe.unified_memory(lab, "transformers").studies}
    own = promoe.on(lab, "transformers").link
    layer = lab.subject.layers[0]
    num_pages = layer.expert_nbytes / promoe.PAGE + layer.num_matrices
    expected = num_pages * (promoe.PAGE / own.nbytes_per_s * 1e9 + promoe.FAULT_NS)
    assert link.occupies_ns(layer.expert_nbytes) == pytest.approx(expected, rel=1e-6)


def test_the_split_experts_of_figure_4b_are_288_of_1440() -> None:
    model = moepic._models()[moepic.QWEN]
    geometry = Geometry((model.layer,) * model.num_layers)
    assert geometry.num_experts == 1440
    budget = Memory(moepic.MEMORY_OF[moepic.QWEN]).budget(geometry)
    assert budget.memory_nbytes // model.layer.expert_nbytes == 288


@pytest.mark.parametrize(("least", "tail"), [(1000, "p90"), (100, "p99")])
def test_a_p99_needs_as_many_tokens_as_make_ten_of_a_hundredth(
    lab: Lab, least: int, tail: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert moe_infinity.LEAST_FOR_P99 == 1000
    monkeypatch.setattr(moe_infinity, "LEAST_FOR_P99", least)
    headers = {name for table in find_experiment("moe-infinity:7").run(lab).tables for name in table.headers}
    assert headers & {"p90", "p99"} == {tail}


# -- where a claim turns round -----------------------------------------------------------------------------------------


def test_what_another_link_turns_round_is_named(told: Callable[..., Finding]) -> None:
    def slower(system: str, machine: str) -> float:
        return 1.5 if system == "promoe" and machine == "half of the link" else 1.0 if system == "lru" else 0.8

    checks = {check.claim.split()[1]: check for check in told("expertly:assumptions", slower).checks}
    assert {name for name, check in checks.items() if check.verdict == FAILS} == {"promoe"}
    assert "not: half of the link (promoe of lru: 1.50x" in checks["promoe"].measured
    assert checks["promoe"].why.startswith("half of the link: promoe loads")
    assert {checks[name].verdict for name in ours.OF_EACH if name != "promoe"} == {HOLDS}


def test_figure_4b_fails_where_whole_experts_are_fastest_and_says_where_splitting_pays(
    told: Callable[..., Finding],
) -> None:
    def slower(system: str, machine: str, best: str) -> float:
        if machine.endswith("launches 16 times as fast"):
            best = "0.375"
        theta = system.partition("theta=")[2]
        if machine.endswith("half of the memory"):  # half a percent is no gain
            return 0.995 if theta == "0.375" else 1.0
        return 1.0 if theta == best else 1.3

    split = told("moepic:4b", lambda system, machine: slower(system, machine, "0.375"))
    assert {check.verdict for check in split.checks} == {HOLDS}
    whole = told("moepic:4b", lambda system, machine: slower(system, machine, "1")).checks
    assert whole[0].verdict == FAILS
    assert whole[0].why.endswith("splitting pays with: launches 16 times as fast")
    assert {check.verdict for check in whole} == {FAILS}, "whole experts that beat caching alone are no split"


def test_figure_4b_says_where_too_few_requests_tell_whether_splitting_pays(lab: Lab) -> None:
    rows = dict.fromkeys(("prefetch only", "0.5", "1", "cache only"), lab.runs("rtx3090").row("lru"))
    few, many = Estimate.mean(np.ones(2)), Estimate.mean(np.ones(9))
    (check, *_) = moepic.splitting("", rows, {"few": (few / 2, few, few), "many": (many / 2, many, many)})
    assert check is not None and check.why.endswith("splitting pays with: many; cannot be told: few")


@pytest.mark.parametrize(("times", "verdict"), [(0.7, HOLDS), (0.98, FAILS)])
def test_figure_8_is_of_memory_and_not_of_speed(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, times: float, verdict: str
) -> None:
    """A point of memory is worth 5 % of the time, so that 2 % save no memory."""
    base = lab.runs("rtx3090").row("lru")

    def row(self: Runs, system: str, memory: str) -> Row:
        factor = (times if system.startswith("moepic") else 1.0) * 0.95 ** float(memory.strip("%"))
        return replace(base, system=system, passes_s=base.passes_s * factor, on_faster_link=None)

    monkeypatch.setattr(Runs, "row", row)
    (check,) = find_experiment("moepic:8").run(lab).checks
    assert check.verdict == verdict
