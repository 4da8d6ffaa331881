"""What can be chosen: every system that runs here and each part of it, and nothing that lacks something."""

from __future__ import annotations

from dataclasses import replace

import pytest

from expertly.core.geometry import LayerGeometry
from expertly.lab.tune.search import Candidate, Space
from expertly.scheduler.presets import SYSTEMS, get_system

LAYERS = (LayerGeometry(8, 2, 32, 24, 3, 2),) * 3
NBYTES = sum(layer.nbytes for layer in LAYERS)
FULL = ("probs", "router_inputs", "lookahead", "embedding", "experts", "token", "weights", "request", "is_prefill")


def space(**changes: object) -> Space:
    return replace(Space(LAYERS, NBYTES // 4, fields=FULL), **changes)  # type: ignore[arg-type]


def presets(of: Space) -> set[str]:
    return {one.system.name for one in of.presets()}


def names(of: Space, one: Candidate) -> set[str]:
    return {other.system.name for other in of.variations(one)}


def test_every_preset_is_there_but_those_that_lack_something() -> None:
    absent = {name for name, system in SYSTEMS.items() if "future" in system.needs}
    trained = {name for name, system in SYSTEMS.items() if system.takes_weights}
    assert absent and trained
    assert presets(space()) == set(SYSTEMS) - absent - trained - {"resident"}
    assert presets(space(has_weights=True)) >= trained - {"resident"}
    assert "resident" in presets(space(memory_nbytes=NBYTES))
    assert "adapmoe" not in presets(space(fields=("experts", "token"))), "no lookahead was recorded"


def test_a_preset_of_others_is_a_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = replace(get_system("lfu:segments=2"), name="my-own")
    monkeypatch.setitem(SYSTEMS.built_in, "my-own", mine)
    assert "my-own" in presets(space())


@pytest.mark.parametrize("name", ["lru", "lcp:segments=4", "adapmoe:window=4", "moepic", "fmoe:distance=3"])
def test_variations_can_be_had_by_their_names_and_change_one_thing(name: str) -> None:
    one = space().named(name)
    found = list(space().variations(one))
    assert len(found) > 5 and len(set(found)) == len(found) and one not in found
    for other in found:
        assert get_system(other.system.name) == other.system
        assert space().can_run(other.system)


def test_what_is_varied() -> None:
    of_lru = names(space(), space().named("lru"))
    assert {"lru:segments=2", "lru:scope=global", "lru:eviction=lcp", "lru:prediction=lookahead"} <= of_lru
    assert "lru:eviction=belady" not in of_lru and "lru:eviction=random" not in of_lru
    assert "lru:prediction=learned" not in of_lru
    assert "lru:prediction=learned" in names(space(has_weights=True), space().named("lru"))
    assert "lru:segments=5" not in of_lru
    of_moepic = space().named("moepic")
    assert {"moepic:segments=1", "moepic:segments=2", "moepic:segments=8", "moepic:distance=2"} <= names(
        space(), of_moepic
    )
    assert any(one.is_planned for one in space().variations(of_moepic))
    assert "lcp:allocation=split:theta=0.25" in names(space(), space().named("lcp:allocation=split"))


def test_a_variation_of_a_variation_keeps_the_first() -> None:
    one = space().named("lru:prediction=lookahead:distance=2")
    found = names(space(), one)
    assert "lru:prediction=lookahead:distance=3" in found
    assert "lru:prediction=lookahead" in found, "back to what the predictor has by itself"
    assert "lru" in found, "and to none, without what is of use to predictors alone"


def test_codecs() -> None:
    plain, both = space(), space(codecs=("none", "planes"))
    assert {one.codec for one in plain.variations(plain.named("lru"))} == {"none"}
    assert both.named("lru").codec == "none"
    assert "planes" in {one.codec for one in both.variations(both.named("lru"))}
    assert {one.codec for one in both.presets()} == {"none", "planes"}


def test_less_memory_where_nobody_said_how_much() -> None:
    free = space(is_free=True)
    assert {one.budget_nbytes for one in free.variations(free.named("lru"))} == {
        NBYTES // 4,
        NBYTES // 4 * 3 // 4,
        NBYTES // 8,
    }
    assert {one.budget_nbytes for one in space().variations(space().named("lru"))} == {NBYTES // 4}
