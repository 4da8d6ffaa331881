"""Experiments whole, on small traces; and what is said where one cannot run."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import numpy as np
import pytest

from expertly.reproduce import rules
from expertly.reproduce.experiment import Experiment
from expertly.reproduce.finding import Check, Finding, Result
from expertly.reproduce.lab import CannotRun, Lab
from expertly.reproduce.moepic import caching
from expertly.reproduce.registry import EXPERIMENTS, select
from expertly.reproduce.session import Session
from expertly.reproduce.subject import Subject
from expertly.scheduler.presets import get_system
from tests.reproduce.small import full_trace, imported_trace


@pytest.fixture(scope="module")
def subjects(tmp_path_factory: pytest.TempPathFactory) -> list[Subject]:
    folder = tmp_path_factory.mktemp("traces")
    return [Subject.open(one(folder / name).folder) for one, name in ((full_trace, "full"), (imported_trace, "bare"))]


@pytest.fixture(scope="module")
def session(subjects: list[Subject], tmp_path_factory: pytest.TempPathFactory) -> Session:
    return Session(subjects, tmp_path_factory.mktemp("scratch"), quick=True)


def run(session: Session, name: str) -> Result:
    (result,) = session.results(select(name))
    return result


def test_small_experts_are_taken_for_larger_ones(subjects: list[Subject]) -> None:
    full, bare = subjects
    assert full.layers[0].expert_nbytes >= 8 << 20 and "times theirs" in full.sizes
    assert full.is_full and full.has_prompts
    assert not bare.is_full and not bare.has_prompts


@pytest.mark.parametrize("name", ["fmoe:12b", "moe-infinity:2", "promoe:13", "moepic:4a"])
def test_an_experiment_whole(session: Session, name: str) -> None:
    result = run(session, name)
    assert result.findings, result.left_out
    for finding in result.findings:
        assert finding.checks and finding.tables and finding.setting
        assert all(check.rule and check.measured for check in finding.checks)
        for table in finding.tables:
            assert table.rows and all(len(row) == len(table.headers) for row in table.shown())
    assert result.findings[0].trace == "full"


def test_what_a_trace_lacks_is_modelled_and_all_else_stays(subjects: list[Subject]) -> None:
    full, bare = subjects
    split = "moepic:allocation=split:theta=0.5:segments=2"
    assert full.fitted(split) == (split, False)
    name, is_modelled = bare.fitted(split)
    assert is_modelled and name == "moepic:prediction=modelled:allocation=split:theta=0.5:segments=2:distance=1"
    assert get_system(name).options_of("allocation") == {"theta": "0.5"}
    assert bare.fitted("promoe:distance=2") == ("promoe:prediction=modelled:distance=2", True)
    assert bare.fitted("lru") == ("lru", False)


def test_hit_rates_are_those_of_the_simulator(
    subjects: list[Subject], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table has what `expertly lab simulate` gives, and the check follows from it."""
    monkeypatch.setattr(caching, "LONGER", 1)
    (finding,) = run(Session(subjects[:1], tmp_path, quick=True), "moepic:table-1").findings
    (table,) = finding.tables
    for row in table.rows:
        random, lfu, lru, lcp, above = (float(cell) for cell in row[1:6])  # type: ignore[arg-type]
        assert above == pytest.approx(lcp - max(lfu, lru))
        assert 0 < random < 1
    expected = all(float(row[5]) >= -0.005 for row in table.rows)  # type: ignore[arg-type]
    assert finding.checks[0].holds == expected


def test_what_learns_has_learned_from_other_requests_unless_it_is_online(
    session: Session, subjects: list[Subject]
) -> None:
    lab = session._lab(subjects[0])
    offline, online = lab.runs("rtx3090"), lab.runs("rtx3090", online=True)
    tested = {span.request for span in offline.study.schedule.test}
    training = {span.request for span in offline.study.schedule.training}
    assert tested and training and not tested & training
    assert offline.row("fmoe")["history"] == f"filled from {len(training)} requests"
    assert online.row("fmoe")["history"] == "empty" and not online.study.schedule.training
    assert offline.row("fmoe")["predictor"]["maps"] > online.row("fmoe")["predictor"]["maps"]
    assert f"{len(training)} other requests learned from" in lab.setting(offline)
    assert "nothing learned" in lab.setting(online)


def test_what_is_waited_for_is_what_the_simulator_stalls(session: Session, subjects: list[Subject]) -> None:
    row = session._lab(subjects[0]).runs("rtx3090").row("lru")
    waited_s = float(row.waiting_s[row.is_decode].sum())
    assert waited_s == pytest.approx(row["decode_stall_s"]) and waited_s > 0
    assert row.waiting(True) == pytest.approx(waited_s / row.passes_s[row.is_decode].sum())


def test_another_seed_learns_from_and_tests_other_requests(subjects: list[Subject], tmp_path: Path) -> None:
    labs = [Lab(subjects[0], tmp_path, seed=seed) for seed in (0, 1)]
    first, other = ([span.request for span in lab.schedule().test] for lab in labs)
    assert first != other
    assert [span.request for span in labs[0].requests_to_test()][: len(first)] == first


def test_all_in_memory_runs_once_whatever_the_budget(session: Session, subjects: list[Subject]) -> None:
    runs = session._lab(subjects[0]).runs("rtx3090")
    rows = [runs.row("resident", memory) for memory in ("25%", "50%", "100%")]
    assert {row.tpot_s for row in rows} == {rows[0].tpot_s} and rows[0].waiting(True) == 0.0


def test_a_direction_that_does_not_hold_is_explained_by_what_ran(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every reason is asked for, as if nothing held."""

    def refused(claim: str, rule: str, measured: str, holds: bool, why: rules.Why) -> Check:
        with contextlib.suppress(StopIteration):  # it asks for the first case that is wrong, and none is
            return Check(claim, rule, measured, False, why if isinstance(why, str) else why())
        return Check(claim, rule, measured, holds)

    monkeypatch.setattr(rules, "_check", refused)
    for name in ("fmoe:12b", "moe-infinity:2", "promoe:13", "moepic:4a"):  # as above: their runs are there
        for finding in run(session, name).findings:
            assert all(len(check.why) > 20 for check in finding.checks if not check.holds)


def test_what_prompts_need_together_grows_with_the_batch(session: Session, subjects: list[Subject]) -> None:
    from expertly.reproduce.batches import prompts_need

    lab = session._lab(subjects[0])
    one, four = (prompts_need(lab, "rtx3090", size) for size in (1, 4))
    assert 0 < one < four <= 1


def test_more_at_once_is_the_same_requests(session: Session, subjects: list[Subject]) -> None:
    from expertly.reproduce.batches import batched

    lab = session._lab(subjects[0])
    one, four = (batched(lab, "rtx3090", size).study for size in (1, 4))
    rows = [span.num_rows for span in (one.schedule.test[-1], four.schedule.test[-1])]
    assert rows[0] == rows[1]
    sizes = [np.unique(study.trace.rows("iteration", 0, study.trace.num_rows)).size for study in (one, four)]
    assert sizes[1] < sizes[0]
    found = four.trace.rows("request", four.schedule.test[-1].first_row, four.trace.num_rows)
    pass_of = four.trace.rows("iteration", four.schedule.test[-1].first_row, four.trace.num_rows)
    assert len(set(found[pass_of == pass_of[0]].tolist())) == 4, "four prompts in one pass"


def test_what_a_trace_lacks_is_said_with_the_command_that_gives_it(subjects: list[Subject], tmp_path: Path) -> None:
    session = Session(subjects[1:], tmp_path / "scratch", quick=True)
    result = run(session, "fmoe:10")
    assert not result.findings and result.verdict == "not run"
    assert "bare: needs prompts" in result.left_out[0] and "expertly lab trace record" in result.left_out[0]
    result = run(session, "promoe:8")
    assert "--predictor FILE" in result.left_out[0] and "--full" in result.left_out[0]


def test_one_that_fails_does_not_stop_the_others(subjects: list[Subject], tmp_path: Path) -> None:
    def fails(lab: Lab) -> Finding:
        raise CannotRun("no such luck")

    broken = Experiment("fmoe", ("0",), "title", "shows", fails, most=1)
    results = list(Session(subjects, tmp_path / "scratch", quick=True).results([broken, EXPERIMENTS["fmoe:16"]]))
    assert results[0].left_out == ("full: no such luck",)
    assert results[1].verdict == "holds"


def test_results_come_back_from_json_and_are_not_run_again(subjects: list[Subject], tmp_path: Path) -> None:
    first = run(Session(subjects, tmp_path / "a", quick=True), "fmoe:16")
    again = Result.of_dict(json.loads(json.dumps(first.as_dict())))
    assert again == first

    def fails(lab: Lab) -> Finding:
        raise AssertionError("it was run again")

    known = Experiment("fmoe", ("16",), "title", "shows", fails)
    session = Session(subjects, tmp_path / "b", quick=True, earlier={"fmoe:16": again})
    assert list(session.results([known])) == [first]
