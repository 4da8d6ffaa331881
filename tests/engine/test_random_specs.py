"""Systems of parts taken at random, in memories and cuts taken at random, give the tokens of the unmodified model."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from expertly.api import handle
from expertly.core.errors import BudgetError, ConfigError
from expertly.scheduler.systems import (
    ACCEPTED,
    OF_PREDICTION,
    OVERLAPPED,
    SYSTEMS,
    System,
    get_system,
    runnable_systems,
)
from tests.engine.conftest import Cases
from tests.engine.observe import loaded, recorded_decisions
from tests.engine.test_lossless import LEAST, least_memory
from tests.families import generate, make_prompts
from tests.tables import seeds

NUMBERS = {"distance": (1, 2, 100), "segments": (1, 2, 4, 16)}
CHOICES = {key: sorted(accepted) for key, accepted in ACCEPTED.items() if key not in ("loop", "host")} | NUMBERS


@st.composite
def random_systems(draw: st.DrawFn) -> System:
    """A preset with other parts, of those that an engine can run. What fails is shown with as few of them as fail."""
    name = draw(st.sampled_from(runnable_systems()))
    keys = draw(st.lists(st.sampled_from(list(CHOICES)), max_size=4, unique=True))
    parts = {key: draw(st.sampled_from(CHOICES[key])) for key in keys}
    if parts.get("prediction", SYSTEMS[name].prediction) == "none":
        parts = {key: value for key, value in parts.items() if key not in OF_PREDICTION}
    try:
        system = get_system(":".join([name, *(f"{key}={value}" for key, value in parts.items())]))
    except ConfigError:
        reject()
    return system if "future" not in system.needs and system.loop == OVERLAPPED else reject()


@settings(max_examples=len(seeds(12, 48)), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(system=random_systems(), memory=st.sampled_from([LEAST, "30%", "60%"]))
def test_no_choice_of_parts_changes_a_token(system: System, memory: str, cases: Cases) -> None:
    """Three prompts of different lengths; whatever is predicted and decided is decided again."""
    case = cases["qwen3_moe"]
    prompts = make_prompts(3, length=14)
    size: Any = "100%" if system.keeps_everything else memory
    if size == LEAST:
        size = least_memory(str(case.store), system.name)
    try:
        with recorded_decisions() as decisions, loaded(case.store, system=system.name, memory=size) as model:
            assert generate(model, prompts, 6) == generate(case.reference, prompts, 6)
            prefetching = handle(model).engine.prefetching
            assert prefetching is None or prefetching.error is None
    except BudgetError:  # a share of all may be less than the staging slots
        assert isinstance(size, str)
        reject()
    assert decisions.difference() is None
