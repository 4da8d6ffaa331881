"""A gate in the engine: the tokens of the reference in either way, what it found told, its decisions made again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
def test_both_ways_give_the_tokens_of_the_reference(system: str, matcher: str, cases: Cases) -> None:
    case = cases["mixtral"]
    with loaded(case.store, system=f"{system}:gate=measured", memory="50%", matcher=matcher) as model:
        gate = handle(model).engine.scheduler.gate
        assert gate is not None
        tokens, ways = 0, set()
        while len(ways) < 2:
            assert generate(model, case.prompts) == case.tokens
            ways.add(gate.is_open)
            tokens += sum(map(len, case.tokens))
            assert tokens < 2000, "after some steps it tries the other way"
        told = prediction(model)["gate"]
        assert told["kind"] == "measured" and told["state"] in ("on", "off") and told["tokens"] > 0
        assert told == expertly.stats(model).as_dict()["devices"][0]["gate"]
        assert gate.can_pause == (system != "fmoe"), "what learns sees every pass"


def test_what_a_gate_decides_is_decided_again(cases: Cases, tmp_path: Path) -> None:
    case, file = cases["mixtral"], tmp_path / "decisions"
    system = "lru:prediction=lookahead:gate=measured"
    with loaded(case.store, system=system, memory="50%", decisions=file) as model:
        gate = handle(model).engine.scheduler.gate
        assert gate is not None
        for _ in range(100):
            generate(model, case.prompts)
            if not gate.is_open:
                break
        assert not gate.is_open
    header, replayed = replay_file(file)
    assert header["system"].endswith("gate=measured") and replayed.difference is None
    assert '["at",["pass ended"' in file.read_text(encoding="utf-8")


def test_each_device_has_a_gate_and_all_hear_of_every_pass(cases: Cases) -> None:
    case = cases["mixtral"]
    with loaded(
        case.store, system="lru:prediction=lookahead:gate=measured", memory="60%", devices="cpu:0,cpu:1"
    ) as model:
        gates = [device.scheduler.gate for device in handle(model).engine.executor.devices]
        for _ in range(100):
            assert generate(model, case.prompts) == case.tokens
            if any(gate is not None and not gate.is_open for gate in gates):
                break
        assert all(gate is not None and not gate.can_pause for gate in gates)
        assert [one["gate"]["kind"] for one in expertly.stats(model).as_dict()["devices"]] == ["measured"] * 2


def test_a_gate_needs_what_is_loaded_ahead_and_not_waited_for(cases: Cases) -> None:
    for system, problem in (
        ("lru:gate=measured", "of no use where nothing is predicted"),
        ("lru:prediction=lookahead:transfer=synchronous:gate=confidence", "accepted: gate=none"),
        ("lru:prediction=lookahead:gate=often", "accepted: none, confidence, measured"),
    ):
        with pytest.raises(ConfigError, match=problem):
            expertly.load(cases["mixtral"].store, system=system)


def test_while_it_is_off_the_model_shows_nothing(cases: Cases) -> None:
    case, shown = cases["mixtral"], {True: 0, False: 0}
    with loaded(case.store, system="lru:prediction=lookahead:gate=measured", memory="50%", matcher="inline") as model:
        engine = handle(model).engine
        gate, collector = engine.scheduler.gate, engine.prefetching.collector
        passes, routed = {True: 0, False: 0}, collector.routed

        def watched(*args: Any) -> Any:
            what = routed(*args)
            shown[gate.is_open] += what is not None
            return what

        collector.routed = watched
        model.register_forward_pre_hook(lambda *args: passes.update({gate.is_open: passes[gate.is_open] + 1}))
        for _ in range(100):
            generate(model, case.prompts)
            if passes[False] > 10:
                break
        assert shown[True] == passes[True] * engine.executor.geometry.num_layers and shown[False] == 0
        assert passes[False] > 10
