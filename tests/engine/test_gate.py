"""A gate in the engine: the tokens of the reference, what it found told, its decisions made again."""

from __future__ import annotations

from pathlib import Path

import pytest

import expertly
from expertly.api import handle
from expertly.core.errors import ConfigError
from expertly.scheduler.decisions import replay_file
from tests.engine.conftest import Cases
from tests.engine.observe import loaded, prediction
from tests.families import generate

pytestmark = pytest.mark.timeout(120)

SPECS = (
    "lru:prediction=lookahead",
    "moepic",
    "adapmoe",
    "fmoe",
)


@pytest.mark.parametrize("matcher", ["inline", "thread"])
@pytest.mark.parametrize("system", SPECS)
def test_it_gives_the_tokens_of_the_reference(system: str, matcher: str, cases: Cases) -> None:
    case = cases["mixtral"]
    with loaded(case.store, system=f"{system}:gate=confidence", memory="50%", matcher=matcher) as model:
        assert handle(model).engine.scheduler.filter is not None
        for _ in range(3):
            assert generate(model, case.prompts) == case.tokens
        told = prediction(model)["gate"]
        assert told["kind"] == "confidence" and told["let"] + told["refused"] > 0
        assert told == expertly.stats(model).as_dict()["devices"][0]["gate"]


def test_what_a_gate_decides_is_decided_again(cases: Cases, tmp_path: Path) -> None:
    case, file = cases["mixtral"], tmp_path / "decisions"
    system = "lru:prediction=lookahead:gate=confidence"
    with loaded(case.store, system=system, memory="50%", decisions=file) as model:
        for _ in range(10):
            generate(model, case.prompts)
    header, replayed = replay_file(file)
    assert header["system"].endswith("gate=confidence") and replayed.difference is None
    assert '["at",["pass began"' in file.read_text(encoding="utf-8")


def test_each_device_has_a_gate(cases: Cases) -> None:
    case = cases["mixtral"]
    with loaded(
        case.store, system="lru:prediction=lookahead:gate=confidence", memory="60%", devices="cpu:0,cpu:1"
    ) as model:
        for _ in range(3):
            assert generate(model, case.prompts) == case.tokens
        gates = [device.scheduler.filter for device in handle(model).engine.executor.shards]
        assert len(set(map(id, gates))) == 2 and None not in gates
        assert [one["gate"]["kind"] for one in expertly.stats(model).as_dict()["devices"]] == ["confidence"] * 2


def test_a_gate_needs_what_is_loaded_ahead_and_not_waited_for(cases: Cases) -> None:
    for system, problem in (
        ("lru:gate=confidence", "of no use where nothing is predicted"),
        ("lru:prediction=lookahead:transfer=synchronous:gate=confidence", "accepted: gate=none"),
        ("lru:prediction=lookahead:gate=often", "accepted: none, confidence"),
    ):
        with pytest.raises(ConfigError, match=problem):
            expertly.load(cases["mixtral"].store, system=system)
