"""Experiments whole, on small traces; and what is said where one cannot run."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from expertly.core.errors import ConfigError
from expertly.core.messages import Prediction
from expertly.core.observation import Routed
from expertly.lab.papers import findings, fmoe, moepic, ours, promoe, recorded
from expertly.lab.papers.findings import FAILS, Check, Experiment, Finding, Result, Told, Why
from expertly.lab.papers.measured import LEAST_REQUESTS, Estimate
from expertly.lab.papers.metrics import HITS, TPOT, TTFT
from expertly.lab.papers.runner import Session, check_asked, find_experiment
from expertly.lab.papers.runs import SHORT, CannotRun, Lab, Row, Runs, batched, experts_needed
from expertly.lab.papers.settings import ReproduceOptions
from expertly.policies.predictor import Predictor
from expertly.scheduler.presets import get_system
from expertly.sim.schedule import Schedule, Selection, make_schedule
from expertly.sim.study import Memory
from expertly.sim.workload import RowRange
from expertly.trace.reader import Trace
from expertly.trace.schema import NO_EXPERT
from tests.lab.papers.small import quick_session

WHOLE = ["fmoe:9", "fmoe:12b", "moe-infinity:2", "promoe:11", "promoe:13", "promoe:23", "moepic:4a"]


def run(session: Session, name: str) -> Result:
    return session.result(find_experiment(name))


def test_small_experts_are_taken_for_larger_ones(session: Session) -> None:
    full, bare = session.subjects
    assert full.layers[0].expert_nbytes >= 8 << 20 and "times theirs" in full.sizes
    assert full.is_full and full.has_prompts
    assert not bare.is_full and not bare.has_prompts


@pytest.mark.parametrize("name", [*WHOLE, "moe-infinity:4.7", "moepic:3.4"])
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

    def refused(
        claim: str, rule: str, measured: str, told: Sequence[Told], unit: str, why: Why, paper: str = ""
    ) -> Check:
        with contextlib.suppress(StopIteration):  # it asks for the first case that is wrong, and none is
            return Check(claim, rule, measured, FAILS, findings.reason_of(why, told))
        return Check(claim, rule, measured, "holds")

    monkeypatch.setattr(findings, "judged", refused)
    for name in WHOLE:  # as above: their runs are there
        for finding in run(session, name).findings:
            assert all(len(check.why) > 20 for check in finding.checks if check.verdict == FAILS)


def test_what_a_user_asks_for_is_done_and_no_claim_counts_it(
    traces: list[Path], session: Session, tmp_path: Path
) -> None:
    changed = quick_session(traces[:1], tmp_path, system="lcp:scope=global", hardware="laptop-nvme", memory="40%")
    for name in ["fmoe:9", "moe-infinity:7", "moe-infinity:4.7", "promoe:11", "promoe:13"]:
        (finding,) = run(changed, name).findings
        assert "laptop-nvme" in finding.setting
        assert "40%" in finding.setting + finding.tables[0].title and "25%" not in finding.setting
        assert any("lcp:scope=global (added)" in row for table in finding.tables for row in table.rows)
        assert "lcp:scope=global" not in str(finding.checks)
    swept = quick_session(traces[:1], tmp_path / "swept", system="lcp:scope=global")
    for name in ("fmoe:11", "moepic:table-1", "promoe:23"):
        for finding in run(swept, name).findings:
            assert any("lcp:scope=global" in header for table in finding.tables for header in table.headers)
            assert finding.checks == run(session, name).findings[0].checks


class Untaught(Predictor):
    gives_probabilities = False

    def router_ran(self, routed: Routed) -> list[Prediction]:
        raise AssertionError

    def __init__(self, *args: object) -> None:
        raise ConfigError("no weights for this model")


def test_an_added_system_that_cannot_run_is_left_out_with_a_note(
    traces: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    untaught = f"lru:prediction={__name__}.Untaught"
    (finding,) = run(quick_session(traces[1:], tmp_path, system=f"{untaught},lfu"), "moe-infinity:4.7").findings
    assert [row[0] for row in finding.tables[0].rows if "(added)" in str(row[0])] == ["lfu (added)"]
    assert f"{untaught} (added) is left out: no weights for this model" in finding.notes
    swept = quick_session(traces[:1], tmp_path / "swept", system="lfu:scope=global")
    has_run: list[str] = []
    row = Runs.row

    def row_but_the_first(self: Runs, system: str, memory: str | Memory | None = None) -> Row:
        if system == "lfu:scope=global" and not has_run:
            has_run.append(system)
            raise CannotRun("too little memory")
        return row(self, system, memory)

    monkeypatch.setattr(Runs, "row", row_but_the_first)
    for name in ("fmoe:11", "moepic:table-1", "promoe:23"):
        has_run.clear()
        finding = run(swept, name).findings[0]
        assert [note for note in finding.notes if "left out" in note] == [
            "lfu:scope=global (added) is left out: too little memory"
        ]
        first, *others = finding.tables[0].rows
        at = next(at for at, header in enumerate(finding.tables[0].headers) if "(added)" in header)
        assert first[at] is None and all(other[at] is not None for other in others)
        assert all(len(line) == len(table.headers) for table in finding.tables for line in table.rows)


@pytest.mark.parametrize("name", ["moe-infinity:9", "promoe:3"])
def test_an_encoder_decoder_is_run_too_and_labelled(
    session: Session, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of a prompt the encoder's layers run, of a step the decoder's."""
    monkeypatch.setenv("EXPERTLY_CACHE", str(tmp_path))
    monkeypatch.setattr(recorded, "SWITCH_REQUESTS", 8)
    monkeypatch.setattr(recorded, "SWITCH_ANSWER", 12)
    finding = run(session, name).findings[-1]
    assert finding.trace == "switch, random weights" and "nobody trained it" in finding.setting
    assert finding.checks and finding.tables[0].rows
    trace = session.lab(recorded.switch(0, str)).trace
    experts, is_prompt = (trace.rows(key, 0, trace.num_rows) for key in ("experts", "is_prefill"))
    runs = experts[..., 0] != NO_EXPERT
    assert runs[is_prompt][:, :4].all() and not runs[is_prompt][:, 4:].any()
    assert runs[~is_prompt][:, 4:].all() and not runs[~is_prompt][:, :4].any()
    assert len(np.unique(experts[..., 0])) > 10


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        (
            "fmoe:3",
            {"system": "lru", "hardware": "a100", "memory": "40%"},
            "it takes no --system, --hardware, --memory; accepted: none",
        ),
        ("fmoe:11", {"memory": "40%"}, "it takes no --memory; accepted: --system, --hardware"),
        ("fmoe:13", {"system": "lru"}, "it takes no --system; accepted: --hardware, --memory"),
    ],
)
def test_what_means_nothing_to_an_experiment_is_refused(
    traces: list[Path], tmp_path: Path, name: str, given: dict[str, str], said: str
) -> None:
    result = run(quick_session(traces[:1], tmp_path, **given), name)
    assert result.verdict == "not run" and said in result.left_out[0]
    options = ReproduceOptions(**given)
    with pytest.raises(ConfigError, match=f"means nothing to {name}"):
        check_asked(options, [find_experiment(name)])
    check_asked(options, [find_experiment(name), find_experiment("fmoe:9")])


def test_what_a_trace_lacks_is_modelled_and_all_else_stays(session: Session) -> None:
    full, bare = session.subjects
    split = "moepic:allocation=split:theta=0.5:segments=2"
    assert full.fitted(split) == (split, False)
    name, is_modelled = bare.fitted(split)
    assert is_modelled and name == "moepic:prediction=modelled:allocation=split:theta=0.5:segments=2:distance=1"
    assert get_system(name).options_of("allocation") == {"theta": "0.5"}
    assert bare.fitted("promoe:distance=2") == ("promoe:prediction=modelled:distance=2", True)
    assert bare.fitted("lru") == ("lru", False)


def test_what_learns_has_learned_from_other_requests_unless_it_is_online(lab: Lab) -> None:
    offline = lab.runs("rtx3090")
    online = lab.runs_of([Schedule([], one.test) for one in lab.schedules()], "rtx3090")
    tested = {span.request for span in offline.study.schedule.test}
    training = {span.request for span in offline.study.schedule.training}
    assert tested and training and not tested & training
    assert offline.row("fmoe")["history"] == f"filled from {len(training)} requests"
    assert online.row("fmoe")["history"] == "empty" and not online.study.schedule.training
    assert offline.row("fmoe")["predictor"]["maps"] > online.row("fmoe")["predictor"]["maps"]
    assert f"{len(training)} other requests learned from" in lab.setting(offline)
    assert "nothing learned" in lab.setting(online)


def test_what_collects_requests_has_enough_to_learn_from(session: Session, lab: Lab, tmp_path: Path) -> None:
    """However few tokens are simulated."""
    few = Lab(session.subjects[0], tmp_path, ReproduceOptions(tokens=50))
    for schedule in few.schedules():
        assert len({span.request for span in schedule.training}) == 17, "all that there are"


def test_every_seed_is_simulated_and_together_they_decode_what_is_asked_for(session: Session, tmp_path: Path) -> None:
    lab = Lab(session.subjects[0], tmp_path, ReproduceOptions(tokens=150))
    runs = lab.runs("rtx3090")
    assert len(runs.studies) == 3
    tests = [{span.request for span in study.schedule.test} for study in runs.studies]
    assert tests[0] != tests[1] != tests[2]
    row = runs.row("lru")
    assert row.is_decode.sum() == 150 and row["tokens"] == sum(
        span.num_rows for study in runs.studies for span in study.schedule.test
    )
    apart = row.by_seed
    assert len(apart) == 3 and row["bytes_loaded"] == sum(one["bytes_loaded"] for one in apart)
    tpot = row.tpot_s
    assert isinstance(tpot, Estimate) and tpot == pytest.approx(row.passes_s[row.is_decode].mean())
    assert len(np.unique(row.units)) == len(set().union(*tests)), "a request of two seeds is drawn once"


def test_a_trace_that_networks_learned_from_is_parted_as_it_was_for_them(session: Session, tmp_path: Path) -> None:
    """Else other seeds would test requests that they know."""
    own = replace(session.subjects[0], learned_from=Selection(split=(7, 3), seed=5))
    known = {span.request for span in make_schedule(own.trace, Selection(split=(7, 3), seed=5)).training}
    schedules = Lab(own, tmp_path, ReproduceOptions()).schedules()
    assert all({span.request for span in one.training} == known for one in schedules)
    orders = [tuple(span.request for span in one.test) for one in schedules]
    assert len(set(orders)) == 3 and not known.intersection(*orders)


def test_moepic_configures_anew_several_times_while_its_stand_in_is_measured(session: Session) -> None:
    lab = Lab(moepic.made_up(moepic.STAND_IN, session._scratch / "mixtral", 0), session._scratch, ReproduceOptions())
    for schedule in lab.schedules():
        spans = [(one.first_row, one.first_row + one.num_rows) for one in schedule.test]
        assert sum(int((~lab.trace.rows("is_prefill", *span)).sum()) for span in spans) >= 3 * moepic.TAU


def test_where_splitting_is_tried_there_are_requests_enough_for_an_interval(tmp_path: Path) -> None:
    lab = Lab(moepic.made_up(moepic.STAND_IN, tmp_path / "mixtral", 0), tmp_path, ReproduceOptions())
    tested = {span.request for one in lab.schedules(1 / 10, SHORT) for span in one.test}
    assert len(tested) >= LEAST_REQUESTS


def test_what_the_configurator_is_told_changes_what_is_measured(lab: Lab) -> None:
    """With the first configuration alone every zeta took the same time to the bit."""
    rows = [lab.runs("a6000").row(f"moepic:tau=16:zeta={zeta}") for zeta in ("0.01", "0.05")]
    assert all(row["allocation"]["configurations"] > 3 for row in rows)
    assert rows[0].tpot_s != rows[1].tpot_s


def test_means_are_of_the_requests_that_the_simulator_ran(lab: Lab) -> None:
    """What intervals are made of adds up to what is reported."""
    runs = lab.runs("rtx3090")
    row = runs.row("lru")
    for metric in (TPOT, TTFT, HITS):
        value = metric.of(row)
        assert isinstance(value, Estimate) and value.interval is not None
        low, high = value.interval
        assert low < value < high
    assert row.hit_rate == pytest.approx(row["hit_rate"]) and row.ttft_s == pytest.approx(row["ttft_s"])
    assert row.tpot_s == pytest.approx(row["tpot_s"])
    assert row.loaded * len(row.passes_s) == pytest.approx(row["bytes_loaded"])
    assert sum(map(row.layer_s, range(8))) < row.tpot_s
    waited_s = float(row.waiting_s[row.is_decode].sum())
    assert waited_s == pytest.approx(row["decode_stall_s"]) and waited_s > 0
    assert row.waiting(True) == pytest.approx(waited_s / row.passes_s[row.is_decode].sum())


def test_whole_layers_have_the_budget_that_they_are_asked_of(lab: Lab) -> None:
    """Whatever ran last."""
    for memory in ("25%", "50%", "25%"):
        row = promoe.whole_layers(lab, "transformers", memory)
        assert row["memory"] == memory and row.on_faster_link is not None
        faster = row.on_faster_link()
        assert faster.tpot_s < row.tpot_s and faster["memory"] == memory


def test_all_in_memory_runs_once_whatever_the_budget(lab: Lab) -> None:
    rows = [lab.runs("rtx3090").row("resident", memory) for memory in ("25%", "50%", "100%")]
    assert {row.tpot_s for row in rows} == {rows[0].tpot_s} and rows[0].waiting(True) == 0.0


def test_more_at_once_is_the_same_requests(lab: Lab) -> None:
    one, four = (batched(lab, "rtx3090", size) for size in (1, 4))
    tests = [runs.study.schedule.test for runs in (one, four)]
    assert [len(spans) for spans in tests] == [4, 1]
    assert sum(span.num_rows for span in tests[0]) == tests[1][0].num_rows
    tpot = four.row("lru").tpot_s
    assert isinstance(tpot, Estimate) and tpot.interval is None, "one batch tells nothing"
    batch, trace = tests[1][0], four.study.trace
    rows = batch.first_row, batch.first_row + batch.num_rows
    pass_of = trace.rows("iteration", *rows)
    assert len(set(trace.rows("request", *rows)[pass_of == pass_of[0]].tolist())) == 4, "four prompts in one pass"
    for decode in (False, True):
        shares = [experts_needed(lab, "rtx3090", size, decode=decode) for size in (1, 4)]
        assert 0 < shares[0] < shares[1] <= 1
    assert experts_needed(lab, "rtx3090", 1, decode=True) == lab.top_k / lab.num_experts


def test_no_request_is_in_two_batches(session: Session, tmp_path: Path) -> None:
    """What is drawn anew is a batch: two with the same request in them are not independent."""
    own = replace(session.subjects[0], learned_from=Selection(split=(1, 3), seed=5))
    lab = Lab(own, tmp_path, ReproduceOptions(tokens=200))
    parts = [{span.request for span in one} for one in lab.requests_apart()]
    assert [len(one) for one in parts] == [6, 6, 6] and len(set().union(*parts)) == 18
    runs = batched(lab, "rtx3090", 1)
    assert [len(study.schedule.test) for study in runs.studies] == [4, 4, 4], "as many as 67 tokens a seed take"
    assert len(runs.row("lru").units) == 12
    assert sum(len(study.schedule.test) for study in batched(lab, "rtx3090", 4).studies) == 3


def test_other_requests_arrive_with_each_seed_where_networks_learned_from_the_trace(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = replace(session.subjects[0], learned_from=Selection(split=(7, 3), seed=5))
    lab = Lab(own, tmp_path, ReproduceOptions())
    monkeypatch.setattr(fmoe, "REQUESTS", 3)
    seen: list[set[int | None]] = []

    def queued(schedules: Sequence[Schedule], *args: object, **options: object) -> None:
        seen.extend({span.request for span in one.test} for one in schedules)
        raise CannotRun("seen")

    monkeypatch.setattr(lab, "runs_of", queued)
    with pytest.raises(CannotRun, match="seen"):
        find_experiment("fmoe:10").run(lab)
    assert [len(one) for one in seen] == [3, 3, 3] and seen[0] != seen[1] != seen[2]


def test_what_is_kept_between_runs_is_tried_on_other_requests_with_each_seed(
    traces: list[Path], session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where networks learned from the trace; and on as many as the tokens take."""
    trace = Trace.open(traces[0])
    trace.manifest = replace(trace.manifest, model="demo")
    own = replace(session.subjects[0], trace=trace, learned_from=Selection(split=(1, 3), seed=5))
    tried: list[list[int | None]] = []

    def loaded(lab: Lab, spans: Sequence[RowRange], system: str, maps: str) -> tuple[float, float]:
        if system == "lru":
            tried.append([span.request for span in spans])
        return 1.0, 0.5

    monkeypatch.setattr(ours, "_loaded", loaded)
    find_experiment("expertly:saved").run(Lab(own, tmp_path, ReproduceOptions(tokens=450)))
    assert [len(one) for one in tried] == [10, 10, 10], "of 15 tokens each, 150 a seed"
    assert set(tried[0]) != set(tried[1]) != set(tried[2])


def test_what_a_trace_lacks_is_said_with_the_command_that_gives_it(traces: list[Path], tmp_path: Path) -> None:
    session = quick_session(traces[1:], tmp_path)
    result = run(session, "fmoe:10")
    assert not result.findings and result.verdict == "not run"
    assert "bare: needs prompts" in result.left_out[0] and "expertly lab trace record" in result.left_out[0]
    result = run(session, "promoe:8")
    assert "--predictor FILE" in result.left_out[0] and "--full" in result.left_out[0]


def test_two_traces_of_a_name_are_refused(traces: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="two of the name 'full'"):
        quick_session([traces[0], traces[0]], tmp_path)


def test_one_that_fails_does_not_stop_the_others(session: Session) -> None:
    def fails(lab: Lab) -> Finding:
        raise CannotRun("no such luck")

    assert session.result(Experiment("fmoe", ("0",), "title", "shows", fails, most=1)).left_out == (
        "full: no such luck",
    )
    assert run(session, "fmoe:16").verdict == "holds"


def test_several_at_once_find_the_same(traces: list[Path], session: Session, tmp_path: Path) -> None:
    experiments = [find_experiment(name) for name in ("fmoe:3", "fmoe:16", "moe-infinity:2")]
    found = [*quick_session(traces, tmp_path).results(experiments, jobs=2)]
    assert [replace(one, seconds=0) for one in found] == [replace(run(session, one.name), seconds=0) for one in found]


def test_a_page_says_how_its_traces_were_made(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = session.subjects[0]
    made = replace(subject.trace.manifest, command="expertly lab trace record --full --out here")
    monkeypatch.setattr(subject.trace, "manifest", made)
    assert session.about()[0].endswith("; `expertly lab trace record --full --out here`")
    monkeypatch.setattr(subject.trace, "manifest", replace(made, command=""))
    assert "``" not in session.about()[0]
