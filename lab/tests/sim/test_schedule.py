"""Which requests run, in which order, and when."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from expertly.core.errors import ConfigError
from expertly_lab.sim.schedule import Arrivals, Schedule, Selection, make_schedule, read_arrivals, split_requests
from expertly_lab.sim.study import Study
from expertly_lab.sim.training import popularity
from expertly_lab.sim.workload import RowRange
from expertly_lab.trace.reader import Trace, TraceRequest
from lab.tests.sim.drive import INFINITE, make_study, make_trace, random_trace, results, sized, toy

LAYERS = sized(1, 6, 1)


def requests(*categories: str | None) -> list[TraceRequest]:
    return [TraceRequest(n, category, None, 0, 10 * n, 10, True) for n, category in enumerate(categories)]


def trace_of(folder: Path, prompt: int = 4, num_passes: int = 6, num_requests: int = 10) -> Trace:
    categories = ["a", "b"] * (num_requests // 2)
    return random_trace(folder, LAYERS, 3, num_passes, prompt=prompt, num_requests=num_requests, categories=categories)


def arrivals(*rows: tuple[int, int, int]) -> Arrivals:
    return Arrivals(*(np.array(column, np.int64) for column in zip(*rows, strict=True)))


def test_the_whole_trace_runs_or_its_first_requests(tmp_path: Path) -> None:
    trace = trace_of(tmp_path / "trace")
    assert make_schedule(trace, Selection()) == Schedule([], [RowRange(None, 0, 100)])
    assert make_schedule(trace, Selection(num_tokens=37)) == Schedule([], [RowRange(None, 0, 37)])
    assert make_schedule(trace, Selection(num_tokens=1000)).test == [RowRange(None, 0, 100)]
    assert make_schedule(trace, Selection(num_requests=2)).test == [RowRange(0, 0, 10), RowRange(1, 10, 10)]
    assert len(make_schedule(trace, Selection(num_requests=99)).test) == 10
    seldom = make_trace(tmp_path / "seldom", [(1, False, [[[0]]])], LAYERS, num_requests=3)
    assert make_schedule(seldom, Selection(num_requests=3)).test == [RowRange(1, 0, 1)], "the others never ran"


def test_a_split_is_stratified_disjoint_whole_and_repeatable() -> None:
    values = requests(*(["law"] * 10 + ["code"] * 20 + [None] * 10))
    training, test = split_requests(values, (7, 3), 5)
    assert sorted(each.number for each in training + test) == list(range(40))
    for category, num in (("law", 7), ("code", 14), (None, 7)):
        assert sum(each.category == category for each in training) == num
    assert split_requests(values, (7, 3), 5) == (training, test)
    rest = [split_requests(values, (7, 3), seed) for seed in range(6, 9)]
    assert all(other != (training, test) for other in rest), "another seed, another split"
    numbers = [each.number for each in test]
    assert numbers != sorted(numbers), "shuffled"


def test_the_proportion_is_rounded_over_all_categories() -> None:
    for num, split, expected in [(10, (7, 3), 7), (11, (7, 3), 8), (15, (7, 3), 11), (2, (7, 3), 1), (3, (1, 1), 2)]:
        training, test = split_requests(requests(*["one"] * num), split, 0)
        assert (len(training), len(test)) == (expected, num - expected)
    for num_each in (1, 2):  # many small ones
        training, _ = split_requests(requests(*(str(n // num_each) for n in range(20))), (7, 3), 0)
        assert len(training) == 14
    for num, split in [(1, (7, 3)), (1, (1, 9)), (3, (99, 1)), (0, (7, 3))]:
        with pytest.raises(ConfigError, match=rf"split={split[0]}:{split[1]}: of {num} requests"):
            split_requests(requests(*["one"] * num), split, 0)


def test_a_split_schedules_the_rest_and_profiles_know_only_the_first_part(tmp_path: Path) -> None:
    trace = trace_of(tmp_path / "trace")
    selection = Selection(split=(7, 3), seed=3, num_requests=2)
    schedule = make_schedule(trace, selection)
    assert len(schedule.training) == 7 and len(schedule.test) == 2
    assert {span.request for span in schedule.training}.isdisjoint(span.request for span in schedule.test)
    study = make_study(trace, selection=selection)
    counts = popularity(trace, schedule.training, study.geometry)
    expected: dict[int, int] = {}
    for span in schedule.training:
        for expert in trace.rows("experts", span.first_row, span.first_row + span.num_rows).reshape(-1).tolist():
            expected[expert] = expected.get(expert, 0) + 1
    assert counts == expected and sum(counts.values()) == 70
    assert popularity(trace, make_schedule(trace, Selection()).training, study.geometry) == {}


@pytest.mark.parametrize(
    ("selection", "flag"), [(Selection(num_requests=1), "requests"), (Selection(split=(7, 3)), "split")]
)
def test_mixed_requests_cannot_be_picked(selection: Selection, flag: str, tmp_path: Path) -> None:
    layers = sized(1, 4, 1)
    together = [([0, 1], False, [[[0]], [[1]]]), (2, False, [[[0]]])]
    trace = make_trace(tmp_path / "together", together, layers, num_requests=3)
    in_turns = [(0, False, [[[0]]]), (1, False, [[[0]]]), (0, False, [[[1]]])]
    turns = make_trace(tmp_path / "turns", in_turns, layers, num_requests=2)
    for each in (trace, turns):
        with pytest.raises(ConfigError, match=f"^{flag}: request . of .* ran together with others"):
            make_schedule(each, selection)
        assert make_schedule(each, Selection(num_tokens=2)).test == [RowRange(None, 0, 2)]
    with pytest.raises(ConfigError, match=r"^arrivals: request"):
        make_schedule(trace, Selection(), arrivals((0, 1, 1)))


def test_arrivals_give_times_and_cut_lengths(tmp_path: Path) -> None:
    """Each request has 4 tokens of a prompt, one pass, whose pass gives the first of the answer's, and 6 passes."""
    trace = trace_of(tmp_path / "trace")
    schedule = make_schedule(trace, Selection(), arrivals((0, 2, 3), (5, 9, 7), (8, 4, 8), (9, 4, 0)))
    assert schedule.test == [
        RowRange(0, 0, 2, 0), RowRange(0, 4, 2, 0),
        RowRange(1, 10, 4, 5), RowRange(1, 14, 6, 5),
        RowRange(2, 20, 4, 8), RowRange(2, 24, 6, 8),
        RowRange(3, 30, 4, 9),
    ]  # fmt: skip
    assert schedule.num_cut == 2, "the second lacks tokens of its prompt, the third one of its answer"
    limited = make_schedule(trace, Selection(num_requests=1), arrivals((0, 2, 3), (5, 9, 7)))
    assert limited.test == [RowRange(0, 0, 2, 0), RowRange(0, 4, 2, 0)]
    without_prompts = trace_of(tmp_path / "decode", prompt=0)
    schedule = make_schedule(without_prompts, Selection(), arrivals((0, 500, 3), (5, 9, 7)))
    assert schedule.test == [RowRange(0, 0, 3, 0), RowRange(1, 6, 6, 5)] and schedule.num_cut == 1
    with pytest.raises(ConfigError, match=r"arrivals: .*no tokens"):
        make_schedule(trace, Selection(), arrivals((0, 0, 0)))


def test_requests_queue_first_come_first_served(tmp_path: Path) -> None:
    """A pass takes 100 of a layer, 1000 of the head and 48 of its expert: 1148 ns; a pass of a prompt as much."""
    passes = [(n, is_first, [[[0]]]) for n in range(3) for is_first in (True, False, False)]
    trace = make_trace(tmp_path / "trace", passes, LAYERS, num_requests=3)
    schedule = make_schedule(trace, Selection(), arrivals((0, 1, 3), (1000, 1, 2), (9000, 1, 3)))
    study = Study(trace, schedule, toy(link=INFINITE), LAYERS, None, is_queued=True)
    row = results(study, ["lru"], "100%")["lru"]
    ends = [3 * 1148, 3 * 1148 + 2 * 1148, 9000 + 3 * 1148]  # the second waits for the first, the third for nobody
    latencies = sorted([ends[0], ends[1] - 1000, ends[2] - 9000])
    assert [round(1e9 * each) for each in row["latency_s"]["sorted"]] == latencies
    assert row["latency_s"]["p50"] * 1e9 == pytest.approx(latencies[1])
    assert row["latency_s"]["max"] == row["latency_s"]["p99"] == row["latency_s"]["sorted"][-1]
    first_tokens = [1148, 4 * 1148 - 1000, 1148]  # from the arrival
    assert row["ttft_s"] * 1e9 == pytest.approx(sum(first_tokens) / 3)
    assert row["tpot_s"] * 1e9 == pytest.approx(1148) and row["requests"] == 3


# -- arrivals ----------


HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
FIRST = "2023-11-16 18:15:46.6805900,374,44\n"
SECOND = "2023-11-16 18:15:50.9951690,396,109\n"
DATA = Path(os.environ.get("EXPERTLY_TEST_DATA", Path(__file__).parents[3].parent / "shared" / "data")) / "arrivals"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "arrivals.csv"
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    return path


@pytest.mark.parametrize(
    ("first", "second", "gap_ns"),
    [
        ("2023-11-16 18:15:46.6805900", "2023-11-16 18:15:50.9951690", 4_314_579_000),
        ("2023-12-31 23:59:59.9", "2024-01-01 00:00:00", 100_000_000),
        ("2024-02-28T23:59:59Z", "2024-03-01T00:00:00Z", 86_401 * 10**9),
        ("2024-05-10 00:00:00.009930+00:00", "2024-05-10 00:00:00.009931+00:00", 1000),
        ("2023-11-16 18:15:46", "2023-11-16 18:15:46", 0),
    ],
)
def test_spellings_of_times(tmp_path: Path, first: str, second: str, gap_ns: int):
    arrivals = read_arrivals(write(tmp_path, f"{HEADER}{first},1,1\n{second},1,1\n"))
    assert arrivals.times_ns.tolist() == [0, gap_ns]


def test_columns_are_found_by_name(tmp_path: Path):
    text = f"\ufeffGeneratedTokens,model,TIMESTAMP,ContextTokens\r\n44,x,{FIRST.split(',')[0]},374\r\n\r\n"
    arrivals = read_arrivals(write(tmp_path, text))
    assert (arrivals.prompt_tokens.tolist(), arrivals.output_tokens.tolist()) == ([374], [44])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\udcff", "no text in UTF-8"),
        ("", "no requests in it; accepted: a CSV file with TIMESTAMP, ContextTokens, GeneratedTokens"),
        (HEADER, "no requests in it"),
        ("TIMESTAMP,ContextTokens\n2023-11-16 18:15:46,1\n", r"\[0\].GeneratedTokens: Field required"),
        (HEADER + SECOND + FIRST, r"\[1\].TIMESTAMP=2023-11-16 18:15:46.*earlier than the row before; sort"),
        (HEADER + FIRST + "2023-11-16 18:15:50,396\n", r"\[1\].GeneratedTokens=None: must be a valid integer"),
        (HEADER + FIRST.replace("374", "-1"), r"\[0\].ContextTokens='-1': must be a valid integer"),
        (HEADER + FIRST.replace("374", "٣"), r"\[0\].ContextTokens='٣'"),
        (HEADER + FIRST.replace(",44", ",9999999999"), r"\[0\].GeneratedTokens=9999999999: must be less than"),
        (HEADER + FIRST.replace("11-16", "11-31"), r"\[0\].TIMESTAMP='2023-11-31 .*': must be a valid datetime"),
        (HEADER + "nan,1,1\n", r"\[0\].TIMESTAMP='nan'"),
        (HEADER + FIRST + '"2023-11-16', "not CSV"),
    ],
)
def test_errors_name_file_key_and_value(tmp_path: Path, text: str, message: str):
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=message) as error:
        read_arrivals(path)
    assert str(path) in str(error.value)


@pytest.mark.skipif(not list(DATA.glob("*.csv")), reason="no recorded arrivals here")
def test_recorded_arrivals():
    for path in DATA.glob("*.csv"):
        arrivals = read_arrivals(path)
        assert len(arrivals) > 1000
        assert arrivals.times_ns[0] == 0 and (arrivals.times_ns[1:] >= arrivals.times_ns[:-1]).all()
        assert arrivals.prompt_tokens.min() > 0
