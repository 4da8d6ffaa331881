"""A system by its name, and with other parts."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest

from expertly.core.errors import ConfigError
from expertly.core.geometry import LayerGeometry
from expertly.policies.allocation import Uniform
from expertly.policies.known import Known
from expertly.policies.lcp import LCPOptions
from expertly.policies.lookahead import Lookahead
from expertly.policies.moepic import LayerStatistics, MoEpic
from expertly.policies.registry import ALLOCATIONS
from expertly.scheduler.budget import Budget, split_budget
from expertly.scheduler.systems import (
    PARTS,
    SYSTEMS,
    _derived,
    default_system,
    get_runnable,
    get_system,
    runnable_systems,
)
from tests.scheduler.drive import geometry, kept, run_layer

SHAPE = geometry(layers=4, experts=8, top_k=2)
BUDGET = split_budget(SHAPE, SHAPE.nbytes // 2)


SPECS = {
    "fmoe:select=top-k:semantic=off": "fmoe:semantic=no:select=top-k",
    " fmoe : distance=03 ": "fmoe:distance=3",
    "lru:distance=2:prediction=lookahead:width=4": "lru:prediction=lookahead:distance=2:width=4",
    "fmoe:prediction=none:eviction=lfu": "fmoe:eviction=lfu:prediction=none",
    "lru:scope=global": "lru:scope=global",
    "fmoe:admission=best:eviction=lfu": "fmoe:eviction=lfu:admission=best",
    "on-demand:prefill=stream": "on-demand:prefill=stream",
    "fmoe:loop=synchronous:eviction=lru": "fmoe:eviction=lru:loop=synchronous",
    "lru:loop=by-id": "lru:loop=by-id",
    "lru:segments=04": "lru:segments=4",
    "lru:theta=.250:allocation=split": "lru:allocation=split:theta=0.25",
    "moepic:width=6:zeta=.02:tau=09": "moepic:width=6:tau=9:zeta=0.02",
    "moepic:prediction=lookahead:tau=9:width=3": "moepic:prediction=lookahead:width=3:tau=9",
    "lcp:allocation=split:admission=best": "lcp:allocation=split:admission=best",
    "moepic:allocation=split:eviction=lru": "moepic:eviction=lru:allocation=split",
}


@pytest.mark.parametrize("spec", SPECS)
def test_a_spec_is_a_system_that_can_be_had_again_by_its_name(spec: str) -> None:
    assert_had_again(spec, SPECS[spec])


def assert_had_again(spec: str, name: str) -> None:
    system = get_system(spec)
    assert system.name == name
    assert get_system(system.name) == system
    known = Known(future=object())
    system.scheduler(SHAPE, BUDGET, known)
    system.predictor(SHAPE, known)


def test_options_of_a_preset_stay_until_their_part_is_replaced() -> None:
    """Whatever else of it is changed."""
    preset = replace(SYSTEMS["moepic"], options=(("width", "5"), ("tau", "70")))

    def derived(*settings: str) -> tuple[tuple[str, str], ...]:
        return _derived(preset, list(settings), "made up").options

    assert derived("eviction=lru") == preset.options
    assert derived("tau=9") == (("width", "5"), ("tau", "9"))
    assert derived("prediction=speculative") == preset.options, "it is the same"
    assert derived("prediction=eam") == (("tau", "70"),)
    assert derived("prediction=eam", "width=3") == (("width", "3"), ("tau", "70"))
    assert derived("prediction=none") == (("tau", "70"),)
    assert derived("allocation=split", "theta=1") == (("width", "5"), ("theta", "1.0"))
    assert preset.options_of("prediction") == {"width": "5"} and preset.options_of("allocation") == {"tau": "70"}


def test_options_are_of_one_part(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Options:
        width: int = 1

    class Wide(Uniform):
        options = Options

    monkeypatch.setitem(ALLOCATIONS.built_in, "wide", Wide)
    with pytest.raises(ConfigError, match="allocation='wide': its option 'width' is called as one of prediction='"):
        get_system("lru:allocation=wide:prediction=lookahead")
    assert get_system("lru:allocation=wide:width=3").options == (("width", "3"),)
    with pytest.raises(ConfigError, match=r"'colour': unknown; accepted with "):
        replace(SYSTEMS["lru"], options=(("colour", "red"),))


def test_what_a_system_needs_follows_from_its_parts() -> None:
    lookahead = get_system("lru:prediction=lookahead")
    assert lookahead.needs == ("lookahead",)
    assert isinstance(lookahead.predictor(SHAPE), Lookahead)
    assert get_system("promoe:prediction=eam").needs == ()
    assert replace(SYSTEMS["lru"], needs=("experts",)).needs == ("experts",)
    nothing = get_system("fmoe:prediction=none:eviction=lru")
    assert nothing.predictor(SHAPE) is None


BAD_PRIORITIES = [("rho", "1"), ("rho", "0"), ("omega", "0"), ("omega", "inf")]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nonsense", r"system='nonsense': unknown; accepted: on-demand, lru"),
        ("nonsense:eviction=lru", r"system='nonsense': unknown; accepted: on-demand, lru"),
        ("lru:", r"system='lru:': '': must be key=value"),
        ("lru:scope", r"'scope': must be key=value"),
        ("lru:=layer", r"'=layer': must be key=value"),
        ("lru:scope=layer:scope=global", r"'scope': given twice"),
        ("lru:scope=galaxy", r"scope='galaxy': unknown; accepted: layer, global"),
        ("lru:prediction=magic", r"prediction='magic': unknown; accepted: none, lookahead"),
        ("lru:allocation=fair", r"allocation='fair': unknown; accepted: uniform, split, moepic"),
        ("fmoe:prefetch=soon", r"prefetch='soon': unknown; accepted: score, fifo, proximity"),
        ("fmoe:loop=size", r"loop='size': unknown; accepted: overlapped, synchronous, by-id"),
        ("fmoe:distance=0", r"distance=0: must be at least 1"),
        ("fmoe:distance=near", r"distance='near': must be a whole number"),
        ("fmoe:colour=red", rf"'colour': unknown; accepted with .*: {', '.join(PARTS)}, semantic"),
        ("lru:semantic=no", r"'semantic': unknown; accepted with prediction=none.*: eviction"),
        ("fmoe:prediction=eam:semantic=no", r"'semantic': unknown; accepted with prediction=eam.*: .*, width"),
        ("moepic:allocation=split:tau=5", r"'tau': unknown; accepted with .*allocation=split, .*: .*theta"),
        ("fmoe:capacity=many", r"system='fmoe:capacity=many': capacity='many': must be a whole number"),
        ("fmoe:select=best", r"select='best': unknown; accepted: delta, top-k"),
        ("lru:allocation=split:theta=2", r"theta=2.0: must be above 0, up to 1"),
        *((f"lcp:{key}={text}", rf"{key}={float(text)}: must be") for key, text in BAD_PRIORITIES),
        ("lru:distance=2", r"distance=2: of no use where nothing is predicted"),
        ("lru:ahead=staging", r"ahead=staging: of no use where nothing is predicted"),
        ("lru:loop=synchronous", r"loop='synchronous' waits for what is predicted.*accepted: loop=overlapped, by-id"),
        ("fmoe:loop=by-id", r"loop='by-id': one expert at a time; accepted: prediction=none"),
        ("expertly:loop=by-id", r"loop='by-id': one expert at a time; accepted: .*admission=always"),
        ("resident:scope=layer", r"'resident' keeps every expert"),
        ("fmoe:allocation=split", r"among layers, scope='global' does not; accepted: scope=layer"),
        ("static:allocation=split", r"by which eviction='static' goes; accepted: eviction=lru, lfu"),
        ("lru:admission=best", r"eviction='lru' does not have; accepted: admission=always, or eviction=lfu, lcp"),
        ("expertly:prefill=evict", r"is weighed against what is kept; accepted: prefill=stream, or admission=always"),
        ("lru:eviction=reuse", r"eviction='reuse' .*accepted: admission=best"),
        ("lru:host=eam", r"host='eam': the tier behind a device is told of uses alone; accepted: host=lru, lfu, lcp"),
        ("lru:host=disk", r"host='disk': unknown; accepted: lru, lfu, lcp, static(, random)?$"),
        ("lru:eviction=fmoe", r"predicted probabilities, which prediction='none' does not give; accepted: prediction="),
    ],
)
def test_an_error_names_the_problem_and_what_is_accepted(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        get_system(spec)


@pytest.mark.parametrize(
    "spec",
    ["x" * 10**5, "fmoe" + ":a=b" * 10**5, *(f"fmoe:{key}{'9' * 10**5}" for key in ("", "capacity=", "select="))],
)
def test_errors_of_a_very_long_spec_are_short(spec: str) -> None:
    with pytest.raises(ConfigError) as caught:
        get_system(spec)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("spec", ["nonsense", "nonsense:eviction=lru", "lru:loop=by-id", "promoe:loop=synchronous"])
def test_where_a_model_runs_what_cannot_is_not_named_as_accepted(spec: str) -> None:
    with pytest.raises(ConfigError, match=f"system={spec.split(':')[0]!r}|system={spec!r}") as refused:
        get_runnable(spec)
    accepted = str(refused.value).split("accepted: ")[1].split(", ")
    assert accepted == ["auto", *runnable_systems()]


@pytest.mark.parametrize("profile", [True, False])
def test_static_pins_in_each_layer_what_is_popular_there(profile: bool) -> None:
    """Layer 3 is the busiest: of the whole model's popularity nothing would be left for layer 0."""
    popularity = {SHAPE.expert_id(layer, expert): (layer + 1) * 8 + expert for layer in range(4) for expert in range(8)}
    known = Known(popularity=popularity if profile else {})
    budget = Budget(0, (2,), (12,), (3, 3, 3, 3))
    control = get_system("static:spare=1:profile_tokens=8").scheduler(SHAPE, budget, known)
    for layer in range(4):
        run_layer(control, layer, list(range(8)), tokens=[1 + expert for expert in range(8)], decode=False)
        for expert in (6, 7, 1, 2, 0, 3, 2, 1):
            run_layer(control, layer, [expert])
        assert kept(control, layer) == {6, 7, 1}, "the two most popular, and the last"


@pytest.mark.parametrize(
    ("system", "options"),
    [("moepic", LCPOptions()), ("moepic:rho=0.5:omega=2", LCPOptions(0.5, 2.0)), ("moepic:eviction=lru", LCPOptions())],
)
def test_the_configurator_ranks_experts_as_the_caches_do(system: str, options: LCPOptions) -> None:
    shape, dice = geometry(layers=1, experts=8, top_k=2, segments=4), random.Random(0)
    control = get_system(system).scheduler(shape, split_budget(shape, shape.nbytes // 2))
    expected, other = LayerStatistics(8, options), LayerStatistics(8, LCPOptions(0.9, 1.0))
    for _ in range(100):
        experts = dice.sample(range(8), 2)
        run_layer(control, 0, experts)
        expected.note(experts)
        other.note(experts)
    assert isinstance(control.allocation, MoEpic)
    hits = control.allocation._seen[0].rates().hits.tolist()
    assert hits == expected.rates().hits.tolist() != other.rates().hits.tolist()


@pytest.mark.parametrize(
    ("kib", "held", "runs_on_host", "name"),
    [
        (2048, 0.25, True, "expertly-ahead"),  # 1.5 MiB of an expert are not there
        (2048, 0.26, True, "expertly"),
        (16384, 0.9, True, "expertly-ahead"),
        (16384, 1.5, True, "expertly"),
        (1535, 0.0, True, "expertly"),
        (16384, 0.25, False, "expertly"),
    ],
)
def test_what_memory_lacks_of_an_expert_decides_which_system_is_the_default(
    kib: int, held: float, runs_on_host: bool, name: str
) -> None:
    layer = LayerGeometry(4, 1, 256, kib, 2, 2)  # 1 KiB a neuron
    assert default_system([layer], int(layer.nbytes * held), runs_on_host=runs_on_host) == name
