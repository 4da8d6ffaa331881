"""A file of decisions: what replays, and that nothing which was changed does."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from expertly.core.errors import ConfigError, TraceError
from expertly.scheduler.budget import split_budget
from expertly.scheduler.decisions import DecisionsFile, header_of, replay_file
from expertly.scheduler.decisions import record as recorded
from expertly.scheduler.presets import SYSTEMS, runnable_systems
from tests.scheduler.drive import geometry, run_layer

Lines = list[bytes]


def record(path: Path, system: str = "lru", order: str = "resident", iterations: int = 20) -> None:
    """A run of random demands, decode and prefill."""
    shape = geometry(3, 8, 2, segments=2)
    budget = split_budget(shape, int(shape.nbytes * (1.0 if SYSTEMS[system].keeps_everything else 0.5)))
    file = DecisionsFile(path, header_of(SYSTEMS[system], shape, budget, order))
    control = recorded(SYSTEMS[system].scheduler(shape, budget, order=order), file.write)
    dice = random.Random(0)
    if SYSTEMS[system].keeps_everything:
        for layer in range(3):
            for expert in range(8):
                for span in control.preload(layer, expert):
                    control.loaded(span)
    for _ in range(iterations):
        decode = dice.random() < 0.8
        for layer in range(3):
            run_layer(control, layer, dice.sample(range(8), 2 if decode else 6), decode=decode, dice=dice)
    file.close()
    file.close()


@pytest.mark.parametrize("system", runnable_systems())
def test_a_new_scheduler_decides_the_same(system: str, tmp_path: Path) -> None:
    record(tmp_path / "d.jsonl", system)
    header, replayed = replay_file(tmp_path / "d.jsonl")
    assert header["system"] == system and header["segments"] == 2
    assert replayed.difference is None
    assert replayed.num_layers == 60
    assert all(isinstance(json.loads(line), list | dict) for line in (tmp_path / "d.jsonl").open())


def changed(lines: Lines, number: int, old: str, new: str) -> Lines:
    """Line `number` (from 1) with `old` replaced, once."""
    line = lines[number - 1].decode()
    assert old in line
    return [*lines[: number - 1], line.replace(old, new, 1).encode(), *lines[number:]]


def line_of(lines: Lines, name: str) -> int:
    """The number of a line in the middle of the file that is a call of that name."""
    return next(n for n, line in enumerate(lines, start=1) if n > 20 and line.startswith(f'["{name}"'.encode()))


DAMAGE: dict[str, tuple[Callable[[Lines], Lines], str]] = {
    "decision": (lambda ls: changed(ls, line_of(ls, "loaded"), "true", "false"), r"line \d+: checksum"),
    "a line gone": (lambda ls: [*ls[:30], *ls[31:]], "line 31: checksum"),
    "a line twice": (lambda ls: [*ls[:31], *ls[30:]], "line 32: checksum"),
    "two lines swapped": (lambda ls: [*ls[:30], ls[31], ls[30], *ls[32:]], "line 31: checksum"),
    "cut between lines": (lambda ls: ls[:50], "line 51: missing: the file was cut, or its writer killed"),
    "cut in a line": (lambda ls: [*ls[:50], ls[50][:9]], "line 51: cut off"),
    "end gone": (lambda ls: ls[:-1], "missing"),
    "more behind the end": (lambda ls: [*ls, ls[3]], "something follows the end"),
    "empty": (lambda ls: [], "line 1: missing"),
    "not JSON": (lambda ls: [*ls[:9], b"hello\n", *ls[10:]], "line 10: checksum"),
    "not UTF-8": (lambda ls: [*ls[:9], b"\xff\xfe\n", *ls[10:]], "line 10: not UTF-8"),
    "an empty line": (lambda ls: [*ls[:9], b"\n", *ls[9:]], "line 10: checksum"),
    "other line ends": (lambda ls: [line.replace(b"\n", b"\r\n") for line in ls], r"line 1: .*"),
    "no header": (lambda ls: ls[1:], "line 1: field 'format': must be 'expertly-decisions'"),
    "header not JSON": (lambda ls: [b"{\n", *ls[1:]], "line 1: not JSON"),
    "header too deep": (lambda ls: [b"[" * 100_000 + b"\n", *ls[1:]], "line 1: not JSON"),
    "other format": (lambda ls: changed(ls, 1, "expertly-decisions", "x"), "line 1: field 'format': must be"),
    "other version": (
        lambda ls: changed(ls, 1, '"version":2', '"version":1'),
        "line 1: field 'version': 1; accepted: 2",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_never_accepted(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    record(path)
    change, expected = DAMAGE[damage]
    path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))
    with pytest.raises(TraceError, match=rf"d\.jsonl, .*{expected}"):
        replay_file(path)


def test_any_byte_that_is_changed_is_found(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    record(path, iterations=3)
    whole, dice = path.read_bytes(), random.Random(0)
    for _ in range(300):
        where = dice.randrange(len(whole))
        path.write_bytes(whole[:where] + bytes([whole[where] ^ (1 << dice.randrange(8))]) + whole[where + 1 :])
        with pytest.raises(TraceError, match=r"d\.jsonl, line"):
            replay_file(path)


def sealed_again(path: Path, change: Callable[[list[list[object]]], None]) -> None:
    """Change the calls of a file as somebody would who can compute checksums."""
    header, *calls = [json.loads(line) for line in path.read_text().splitlines()]
    header.pop("crc32")
    calls = [call[:-1] for call in calls[:-1]]
    change(calls)
    file = DecisionsFile(path, header)
    for one in calls:
        file.write(json.dumps(one, separators=(",", ":")))
    file.close()


def first_call(calls: list[list[object]], name: str) -> list[object]:
    return next(call for call in calls[20:] if call[0] == name)


def test_another_decision_is_named_with_what_it_should_have_been(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    record(path)

    def change(calls: list[list[object]]) -> None:
        first_call(calls, "begin_layer")[2][1] = []

    sealed_again(path, change)
    difference = replay_file(path)[1].difference
    assert difference is not None
    line, recorded, replayed = difference
    assert line > 20 and recorded.startswith('["begin_layer"') and recorded != replayed


@pytest.mark.parametrize(
    ("name", "observation", "expected"),
    [
        ("loaded", [0, 0, 0, 1, 0], "impossible: "),
        ("computed", [[99, 0, 0, 1, 0]], "impossible: "),
        ("begin_layer", [[7, [0], [1], [True], 1], []], "impossible: "),
    ],
)
def test_an_observation_that_cannot_be_is_a_difference(
    name: str, observation: object, expected: str, tmp_path: Path
) -> None:
    path = tmp_path / "d.jsonl"
    record(path)

    def change(calls: list[list[object]]) -> None:
        first_call(calls, name)[1] = observation

    sealed_again(path, change)
    difference = replay_file(path)[1].difference
    assert difference is not None and expected in difference[2]


@pytest.mark.parametrize(
    "call",
    [
        ["begin_layer", [1, 2], None],
        ["loaded", None, True],
        ["explode", None, None],
        [],
        ["predict", [0], None],
        ["foresee", 0, None],
        ["loaded", [0, 0, 10**30, 1, 0], False],
        ["computed", [[0, 0, 1, 2, 0]], None],
    ],
)
def test_a_line_that_is_no_call_is_named(call: object, tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    record(path)

    def change(calls: list[object]) -> None:
        calls[0] = call

    sealed_again(path, change)
    with pytest.raises(TraceError, match=r"d\.jsonl, line 2: "):
        replay_file(path)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("system", "nonsense", "system='nonsense': unknown"),
        ("system", "belady", "needs to know the demands to come"),
        ("system", 5, "field 'system': 5: must be a text"),
        ("system", "lru:eviction=os.system", r"field 'system': eviction=os\.system: a file does not say .*accepted: "),
        ("segments", [1], r"field 'segments': \[1\]: must be a whole number"),
        ("segments", 10**9, "accepted: up to 16777216"),
        ("segments", 3, "segments=3: must divide"),
        ("segments", "x", "line 1: "),
        ("layers", [], "without MoE layers"),
        ("layers", [{"num_experts": 8}], "line 1: "),
        ("budget", {}, "field 'memory_nbytes': missing"),
        (
            "budget",
            {"memory_nbytes": 1, "staging_slots": [], "kept_slots": [], "layer_quotas": []},
            "field 'budget': not of as",
        ),
        (
            "budget",
            {"memory_nbytes": 1, "staging_slots": [4], "kept_slots": [10**12], "layer_quotas": [1, 1, 1]},
            "field 'budget': .*accepted: 0 to 48 slots",
        ),
    ],
)
def test_a_header_of_which_no_scheduler_can_be_made(key: str, value: object, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    record(path)
    header = json.loads(path.read_text().splitlines()[0])
    header.pop("crc32")
    DecisionsFile(path, header | {key: value}).close()
    with pytest.raises(TraceError, match=expected):
        replay_file(path)


def test_a_file_with_the_older_names_of_its_fields_replays(tmp_path: Path) -> None:
    path, old = tmp_path / "d.jsonl", tmp_path / "old.jsonl"
    record(path)
    header, *calls = [json.loads(line) for line in path.read_text().splitlines()]
    del header["crc32"]
    older = {"staging_slots": "ring_slots", "layer_quotas": "layer_shares"}
    budget = {older.get(name, name): value for name, value in header["budget"].items()}
    assert "ring_slots" in budget
    file = DecisionsFile(old, header | {"budget": budget})
    for call in calls[:-1]:
        file.write(json.dumps(call[:-1], separators=(",", ":")))
    file.close()
    assert replay_file(old)[1] == replay_file(path)[1] and replay_file(old)[1].difference is None


def test_a_file_that_is_not_there_or_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"nowhere.*cannot be read"):
        replay_file(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"decisions=.*cannot be written"):
        DecisionsFile(tmp_path / "no" / "folder", {})
