"""Systems of parts taken at random, in memories, staging slots, cuts and devices taken at random: the tokens of the
unmodified model, and slots that agree, each time.
"""

from __future__ import annotations

import contextlib
import random
import re
from pathlib import Path
from typing import Any

import pytest

import expertly
from expertly.api import handle
from expertly.core.errors import BudgetError, ConfigError
from expertly.scheduler.decisions import replay_file
from expertly.scheduler.presets import SYSTEMS, get_system, runnable_systems
from expertly.scheduler.system import ACCEPTED, OF_PREDICTION, System
from tests.engine.conftest import Cases
from tests.engine.observe import loaded
from tests.families import generate, make_prompts
from tests.tables import seeds

pytestmark = pytest.mark.timeout(120)

CHANCES = {"prediction": 0.6, "order": 0.4, "preemption": 0.4, "transfer": 0.4, "eviction": 0.3}
NUMBERS = {"distance": (1, 2, 100), "window": (1, 3, 100), "segments": (1, 2, 4, 16)}


def random_system(dice: random.Random) -> System:
    """A preset with other parts, of those that an engine can run."""
    while True:
        name = dice.choice(runnable_systems())
        values = {key: sorted(accepted) for key, accepted in ACCEPTED.items()} | NUMBERS
        given = {key: dice.choice(values[key]) for key in values if dice.random() < CHANCES.get(key, 0.2)}
        if given.get("prediction", SYSTEMS[name].prediction) == "none":
            given = {key: value for key, value in given.items() if key not in OF_PREDICTION}
        with contextlib.suppress(ConfigError):
            system = get_system(":".join([name, *(f"{key}={value}" for key, value in given.items())]))
            if "future" not in system.needs:
                return system


def random_settings(dice: random.Random, system: System, store: Path) -> dict[str, Any]:
    """Where and in how much memory it runs: often in the least."""
    settings: dict[str, Any] = {"system": system.name, "memory": dice.choice(["least", "least", "30%", "60%"])}
    if system.keeps_everything:
        settings["memory"] = "100%"
    if dice.random() < 0.3:
        settings["segments"] = dice.choice([1, 4, 16])
    if dice.random() < 0.3:
        settings["staging_slots"] = dice.choice([1, 2, 5])
    if dice.random() < 0.3:
        settings["devices"] = dice.choice(["cpu:0,cpu:1", "cpu:0,cpu:1,cpu:2"])
    if settings["memory"] == "least":
        with pytest.raises(BudgetError) as caught:
            expertly.load(
                str(store), **({"device": "cpu"} if "devices" not in settings else {}), **settings | {"memory": 1}
            )
        found = re.search(r"the least that works is (\d+)", str(caught.value))
        assert found is not None
        settings["memory"] = int(found[1])
    return settings


@pytest.mark.parametrize("seed", seeds(2, 8))
def test_no_choice_of_parts_changes_a_token(seed: int, cases: Cases, tmp_path: Path) -> None:
    """Three prompts of different lengths; whatever one device predicts inline and decides is decided again."""
    dice = random.Random(seed)
    case = cases["qwen3_moe"]
    prompts = make_prompts(3, length=14)
    expected = generate(case.reference, prompts, 6)
    num_run = num_replayed = 0
    while num_run < 6:
        system = random_system(dice)
        settings = random_settings(dice, system, case.store)
        path = None
        if "devices" not in settings:
            path = settings["decisions"] = tmp_path / "decisions.jsonl"
        if system.prediction != "none":
            settings["predict"] = dice.choice(["auto", "inline"])
        try:
            with loaded(case.store, **settings) as model:
                assert generate(model, prompts, 6) == expected, settings
                prefetching = handle(model).engine.prefetching
                assert prefetching is None or prefetching.error is None, settings
        except BudgetError:  # a share of all may be less than the staging slots
            assert isinstance(settings["memory"], str), settings
            continue
        num_run += 1
        if path is not None:
            assert replay_file(path)[1].difference is None, settings
            num_replayed += 1
    assert num_replayed >= 2
