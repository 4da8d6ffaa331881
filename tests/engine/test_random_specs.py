"""Systems of parts taken at random, in memories and cuts taken at random, give the tokens of the unmodified model."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import Any

import pytest

from expertly.api import handle
from expertly.core.errors import BudgetError, ConfigError
from expertly.scheduler import systems
from expertly.scheduler.systems import ACCEPTED, OF_PREDICTION, SYSTEMS, System, get_system
from tests.engine.conftest import Cases
from tests.engine.observe import loaded, recorded_decisions
from tests.engine.test_lossless import LEAST, least_memory
from tests.families import generate, make_prompts
from tests.tables import seeds

pytestmark = pytest.mark.timeout(120)

CHANCES = {"prediction": 0.6, "eviction": 0.3}
NUMBERS = {"distance": (1, 2, 100), "segments": (1, 2, 4, 16)}


def random_system(dice: random.Random) -> System:
    """A preset with other parts, of those that an engine can run."""
    while True:
        name = dice.choice(systems.runnable_systems())
        values = {key: sorted(accepted) for key, accepted in ACCEPTED.items()} | NUMBERS
        parts = {key: dice.choice(values[key]) for key in values if dice.random() < CHANCES.get(key, 0.2)}
        if parts.get("prediction", SYSTEMS[name].prediction) == "none":
            parts = {key: value for key, value in parts.items() if key not in OF_PREDICTION}
        with contextlib.suppress(ConfigError):
            system = get_system(":".join([name, *(f"{key}={value}" for key, value in parts.items())]))
            if "future" not in system.needs and system.loop == systems.OVERLAPPED:
                return system


def random_settings(dice: random.Random, system: System, store: Path) -> dict[str, Any]:
    """Where and in how much memory it runs: often in the least."""
    memory = "100%" if system.keeps_everything else dice.choice([LEAST, LEAST, "30%", "60%"])
    return {"system": system.name, "memory": least_memory(str(store), system.name) if memory == LEAST else memory}


@pytest.mark.parametrize("seed", seeds(2, 8))
def test_no_choice_of_parts_changes_a_token(seed: int, cases: Cases) -> None:
    """Three prompts of different lengths; whatever is predicted and decided is decided again."""
    dice = random.Random(seed)
    case = cases["qwen3_moe"]
    prompts = make_prompts(3, length=14)
    expected = generate(case.reference, prompts, 6)
    num_run = 0
    while num_run < 6:
        system = random_system(dice)
        settings = random_settings(dice, system, case.store)
        try:
            with recorded_decisions() as decisions, loaded(case.store, **settings) as model:
                assert generate(model, prompts, 6) == expected, settings
                prefetching = handle(model).engine.prefetching
                assert prefetching is None or prefetching.error is None, settings
        except BudgetError:  # a share of all may be less than the staging slots
            assert isinstance(settings["memory"], str), settings
            continue
        num_run += 1
        assert decisions.difference() is None, settings
