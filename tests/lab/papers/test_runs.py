"""Experiments whole, on small traces; and what is said where one cannot run."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from expertly.core.errors import ConfigError
from expertly.lab.papers import findings, moepic
from expertly.lab.papers.findings import FAILS, Check, Experiment, Finding, MeanOfRequests, Result, Told, Why
from expertly.lab.papers.metrics import HITS, TPOT, TTFT
from expertly.lab.papers.runner import EXPERIMENTS, Session
from expertly.lab.papers.runs import CannotRun, Lab, batched, prompts_need
from expertly.scheduler.presets import get_system
from tests.lab.papers.small import full_trace, imported_trace

WHOLE = ["fmoe:9", "fmoe:12b", "moe-infinity:2", "promoe:13", "moepic:4a"]


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("traces")
    return [one(folder / name).folder for one, name in ((full_trace, "full"), (imported_trace, "bare"))]


@pytest.fixture(scope="module")
def session(traces: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Session:
    return Session(traces, tmp_path_factory.mktemp("scratch"), quick=True)


@pytest.fixture(scope="module")
def lab(session: Session) -> Lab:
    return session.lab(session.subjects[0])


def run(session: Session, name: str) -> Result:
    return session.result(EXPERIMENTS[name])


def test_small_experts_are_taken_for_larger_ones(session: Session) -> None:
    full, bare = session.subjects
    assert full.layers[0].expert_nbytes >= 8 << 20 and "times theirs" in full.sizes
    assert full.is_full and full.has_prompts
    assert not bare.is_full and not bare.has_prompts


@pytest.mark.parametrize("name", [*WHOLE, "moe-infinity:4.7", "moepic:3.4", "fmoe:start"])
def test_an_experiment_whole(session: Session, name: str) -> None:
    result = run(session, name)
    assert result.findings, result.left_out
    for finding in result.findings:
        assert finding.checks and finding.tables and finding.setting
        assert all(check.rule and check.measured for check in finding.checks)
        for table in finding.tables:
            assert table.rows and all(len(row) == len(table.headers) for row in table.shown())
    assert result.findings[0].trace == "full"


def test_a_claim_that_does_not_hold_is_explained_by_what_ran(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every reason is asked for, as if nothing held."""

    def refused(claim: str, rule: str, measured: str, told: Sequence[Told], unit: str, why: Why) -> Check:
        with contextlib.suppress(StopIteration):  # it asks for the first case that is wrong, and none is
            return Check(claim, rule, measured, FAILS, why if isinstance(why, str) else why())
        return Check(claim, rule, measured, "holds")

    monkeypatch.setattr(findings, "judged", refused)
    for name in WHOLE:  # as above: their runs are there
        for finding in run(session, name).findings:
            assert all(len(check.why) > 20 for check in finding.checks if check.verdict == FAILS)


def test_what_a_trace_lacks_is_modelled_and_all_else_stays(session: Session) -> None:
    full, bare = session.subjects
    split = "moepic:allocation=split:theta=0.5:segments=2"
    assert full.fitted(split) == (split, False)
    name, is_modelled = bare.fitted(split)
    assert is_modelled and name == "moepic:prediction=modelled:allocation=split:theta=0.5:segments=2:distance=1"
    assert get_system(name).options_of("allocation") == {"theta": "0.5"}
    assert bare.fitted("promoe:distance=2") == ("promoe:prediction=modelled:distance=2", True)
    assert bare.fitted("lru") == ("lru", False)


def test_the_table_of_hit_rates_decides_the_claim(
    traces: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moepic, "LONGER", 1)
    (finding,) = run(Session(traces[:1], tmp_path, quick=True), "moepic:table-1").findings
    rows = [[float(cell) for cell in row[1:6]] for row in finding.tables[0].rows]  # type: ignore[arg-type]
    for random, lfu, lru, lcp, above in rows:
        assert above == pytest.approx(lcp - max(lfu, lru))
        assert 0 < random < 1
    assert (finding.checks[0].verdict == FAILS) <= any(row[4] < -0.005 for row in rows)


def test_what_learns_has_learned_from_other_requests_unless_it_is_online(lab: Lab) -> None:
    offline, online = lab.runs("rtx3090"), lab.runs("rtx3090", online=True)
    tested = {span.request for span in offline.study.schedule.test}
    training = {span.request for span in offline.study.schedule.training}
    assert tested and training and not tested & training
    assert offline.row("fmoe")["history"] == f"filled from {len(training)} requests"
    assert online.row("fmoe")["history"] == "empty" and not online.study.schedule.training
    assert offline.row("fmoe")["predictor"]["maps"] > online.row("fmoe")["predictor"]["maps"]
    assert f"{len(training)} other requests learned from" in lab.setting(offline)
    assert "nothing learned" in lab.setting(online)


def test_means_are_of_the_requests_that_the_simulator_ran(lab: Lab) -> None:
    """What intervals are made of adds up to what is reported."""
    runs = lab.runs("rtx3090")
    row = runs.row("lru")
    for metric in (TPOT, TTFT, HITS):
        value = metric.of(row)
        assert isinstance(value, MeanOfRequests) and len(value.counts) == len(runs.study.schedule.test)
        assert value.sums.sum() / value.counts.sum() == pytest.approx(float(value))
    waited_s = float(row.waiting_s[row.is_decode].sum())
    assert waited_s == pytest.approx(row["decode_stall_s"]) and waited_s > 0
    assert row.waiting(True) == pytest.approx(waited_s / row.passes_s[row.is_decode].sum())


def test_another_seed_learns_from_and_tests_other_requests(session: Session, tmp_path: Path) -> None:
    labs = [Lab(session.subjects[0], tmp_path, seed=seed) for seed in (0, 1)]
    first, other = ([span.request for span in lab.schedule().test] for lab in labs)
    assert first != other
    assert [span.request for span in labs[0].requests_to_test()][: len(first)] == first


def test_all_in_memory_runs_once_whatever_the_budget(lab: Lab) -> None:
    rows = [lab.runs("rtx3090").row("resident", memory) for memory in ("25%", "50%", "100%")]
    assert {row.tpot_s for row in rows} == {rows[0].tpot_s} and rows[0].waiting(True) == 0.0


def test_more_at_once_is_the_same_requests(lab: Lab) -> None:
    one, four = (batched(lab, "rtx3090", size).study for size in (1, 4))
    rows = [span.num_rows for span in (one.schedule.test[-1], four.schedule.test[-1])]
    assert rows[0] == rows[1]
    sizes = [np.unique(study.trace.rows("iteration", 0, study.trace.num_rows)).size for study in (one, four)]
    assert sizes[1] < sizes[0]
    found = four.trace.rows("request", four.schedule.test[-1].first_row, four.trace.num_rows)
    pass_of = four.trace.rows("iteration", four.schedule.test[-1].first_row, four.trace.num_rows)
    assert len(set(found[pass_of == pass_of[0]].tolist())) == 4, "four prompts in one pass"
    assert 0 < prompts_need(lab, "rtx3090", 1) < prompts_need(lab, "rtx3090", 4) <= 1


def test_what_a_trace_lacks_is_said_with_the_command_that_gives_it(traces: list[Path], tmp_path: Path) -> None:
    session = Session(traces[1:], tmp_path, quick=True)
    result = run(session, "fmoe:10")
    assert not result.findings and result.verdict == "not run"
    assert "bare: needs prompts" in result.left_out[0] and "expertly lab trace record" in result.left_out[0]
    result = run(session, "promoe:8")
    assert "--predictor FILE" in result.left_out[0] and "--full" in result.left_out[0]


def test_two_traces_of_a_name_are_refused(traces: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="two of the name 'full'"):
        Session([traces[0], traces[0]], tmp_path)


def test_one_that_fails_does_not_stop_the_others(session: Session) -> None:
    def fails(lab: Lab) -> Finding:
        raise CannotRun("no such luck")

    assert session.result(Experiment("fmoe", ("0",), "title", "shows", fails, most=1)).left_out == (
        "full: no such luck",
    )
    assert run(session, "fmoe:16").verdict == "holds"


def test_results_come_back_from_json(session: Session, tmp_path: Path) -> None:
    result = run(session, "fmoe:16")
    assert Result.of_dict(json.loads(json.dumps(result.as_dict()))) == result
    kept = tmp_path / "results.json"
    kept.write_text(json.dumps(session.facts([result])), "utf-8")
    assert session.earlier(kept) == {"fmoe:16": result}
