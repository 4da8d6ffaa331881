"""Experiments whole, on small traces; what is said where one cannot run; and what their runs measure."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from expertly.core.errors import ConfigError
from expertly_lab.papers.judge import HITS, LOADED, RIGHT, TPOT, TTFT, WAITING
from expertly_lab.papers.runner import PAPERS, Session, experiments, find_experiment, select
from expertly_lab.papers.runs import REQUESTS, Lab
from expertly_lab.papers.settings import ReproduceOptions

COMPARISONS = [experiment for experiment in experiments() if len(experiment.systems) > 2]


@pytest.mark.parametrize("name", [experiment.name for experiment in experiments()])
def test_every_experiment_runs_and_is_judged(name: str, session: Session) -> None:
    experiment = find_experiment(name)
    full = session.finding(experiment, "full")
    assert full.verdicts or full.left_out, full
    if not experiment.needs:
        assert full.verdicts and not full.left_out
        assert {claim.text for claim, _ in full.verdicts} <= {claim.text for claim in experiment.claims}


@pytest.mark.parametrize("experiment", COMPARISONS, ids=lambda experiment: experiment.name)
def test_lru_and_on_demand_stand_in_every_comparison(experiment: object) -> None:
    assert {"lru", "on-demand"} <= set(experiment.systems), "of several systems"  # type: ignore[attr-defined]


def test_a_run_measures_what_the_simulation_did(session: Session) -> None:
    lab = session.lab("full")
    cell = lab.run("promoe:prediction=lookahead")
    values = {name: sample.value for name, sample in cell.samples.items()}
    assert values[TPOT.name] == pytest.approx(cell.facts["tpot_s"])
    assert values[TTFT.name] == pytest.approx(cell.facts["ttft_s"])
    assert values[HITS.name] == pytest.approx(cell.facts["hit_rate"], rel=0.02)
    assert 0 < values[WAITING.name] < 1 and values[RIGHT.name] == cell.facts["prediction_accuracy"]
    loaded = cell.samples[LOADED.name]
    assert loaded.sums.sum() == pytest.approx(cell.facts["bytes_loaded"])
    assert lab.run("promoe:prediction=lookahead") is cell, "made once"


def test_all_systems_run_the_same_requests_and_learn_from_none_of_them(session: Session) -> None:
    lab = session.lab("full")
    schedule = lab.schedule()
    assert not {span.request for span in schedule.training} & {span.request for span in schedule.test}
    num = {name: len(lab.run(name).samples[TPOT.name].sums) for name in ("lru", "fmoe", "resident")}
    assert set(num.values()) == {len(schedule.test)}


def test_answers_are_cut_so_that_there_are_requests_to_draw_from(session: Session) -> None:
    lab = Lab(session.lab("bare").subject, replace(session.lab("bare").options, tokens=2 * REQUESTS))
    assert all(span.num_rows <= 2 for span in lab.schedule().test)


def test_a_faster_link_takes_less_time_and_loads_the_same(session: Session) -> None:
    lab = session.lab("bare")
    slow, fast = (lab.run("lru", links=links) for links in (1, 6))
    assert fast.samples[TPOT.name].value < slow.samples[TPOT.name].value
    assert fast.facts["bytes_loaded"] == slow.facts["bytes_loaded"] and "x 6" not in str(slow.facts)


@pytest.mark.parametrize("system", ["lru", "on-demand"])
def test_six_devices_wait_less_and_hit_the_same(system: str, session: Session) -> None:
    lab = session.lab("full")
    alone, six = (lab.run(system, num_devices=num) for num in (1, 6))
    assert six.samples[WAITING.name].value < alone.samples[WAITING.name].value
    assert np.array_equal(six.samples[HITS.name].sums, alone.samples[HITS.name].sums)
    assert six.facts["bytes_loaded"] == alone.facts["bytes_loaded"]
    for facts, samples in ((each.facts, each.samples) for each in (alone, six)):
        decode_s = facts["tpot_s"] * facts["decode_iterations"]
        assert samples[WAITING.name].value == pytest.approx(facts["decode_stall_s"] / decode_s)


def test_what_a_trace_lacks_is_modelled_or_said(session: Session) -> None:
    assert session.lab("bare").run("promoe").is_modelled and not session.lab("full").run("lru").is_modelled
    needing = replace(find_experiment("fmoe:9"), needs=("prompts",))
    finding = session.finding(needing, "bare")
    assert finding.left_out.startswith("needs prompts, which it lacks (`expertly lab trace record`")


def test_requests_queue_online(session: Session) -> None:
    cell = session.lab("full").run("lru", is_online=True)
    latencies = cell.samples["latency"].sums
    assert len(latencies) == cell.facts["requests"] and np.all(latencies > 0)
    assert cell.samples["latency p90"].value >= np.median(latencies)


def test_several_names_are_chosen_in_the_order_of_the_papers() -> None:
    first, second = experiments()[1].name, experiments()[0].name
    assert [experiment.name for experiment in select(f"{first}, {second}")] == [second, first]
    assert len(select("all")) == len(experiments()) == sum(len(paper.experiments) for paper in PAPERS.values())


def test_two_traces_of_one_name_are_refused(session: Session) -> None:
    folder = session.subjects[0].trace.folder
    with pytest.raises(ConfigError, match="two of the name 'full'"):
        Session(ReproduceOptions(trace=[folder, folder], quick=True))
