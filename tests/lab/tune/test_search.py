"""What can be chosen, every system that runs here and each part of it; and the search, which ends when time is up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from expertly.core.geometry import LayerGeometry
from expertly.lab.tune.search import KEPT, Candidate, Deadline, Scored, SearchResult, Space, finalists, rungs_of, search
from expertly.scheduler.presets import SYSTEMS, get_system
from tests.lab.tune.toys import FakeClock, candidate

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


# -- the search ------------------------------------------------------------------------------------------------------


SEEDS = [candidate(name) for name in ("lru", "lfu", "lcp")]


def vary(one: Candidate):
    """P twice as large."""
    segments = one.system.segments
    if segments < 16:
        name = one.system.name.split(":")[0]
        yield replace(one, system=get_system(f"{name}:segments={2 * segments}"))


def seconds(one: Candidate) -> float:
    return {"lru": 3.0, "lfu": 2.0, "lcp": 4.0}[one.system.name.split(":")[0]] - 0.1 * one.system.segments


def found(limit: float = 1e9, step: float = 0.0, num_requests: int = 8) -> tuple[SearchResult, list[tuple[str, int]]]:
    tried: list[tuple[str, int]] = []

    def score(one: Candidate, num: int, until: Deadline) -> float:
        tried.append((one.system.name, num))
        return num * seconds(one)

    clock = FakeClock(step)
    return search(SEEDS, vary, score, num_requests, Deadline.after(clock, limit)), tried


def test_variations_of_variations_are_found_on_little_and_ranked_on_all() -> None:
    result, tried = found()
    best = result.ranking[0]
    assert (best.candidate.system.name, best.num_requests) == ("lfu:segments=16", 8)
    assert result.is_whole and result.num_scored == len({name for name, _ in tried})
    assert {num for _, num in tried} == {2, 4, 8} == set(rungs_of(8))
    assert len({name for name, num in tried if num == 8}) <= 1 + KEPT[1] + 4
    (first,) = [one for one in result.ranking if one.candidate == SEEDS[0]]
    assert first.num_requests == 8, "what others are compared with goes on"


def test_the_same_scores_lead_to_the_same_ranking() -> None:
    assert found()[1] == found()[1]
    assert found()[0].ranking == found()[0].ranking


def test_it_ends_when_time_is_up_with_what_it_has() -> None:
    result, tried = found(limit=10.0, step=1.0)
    assert not result.is_whole and 0 < len(tried) < len(found()[1])
    assert result.ranking and result.ranking[0].candidate.system.name.startswith("lfu")
    assert found(limit=0.0, step=1.0)[0].ranking == []


def test_what_cannot_run_is_no_part_of_it() -> None:
    clock = FakeClock()
    result = search(SEEDS, vary, lambda one, num, until: None, 4, Deadline.after(clock, 1e9))
    assert result.ranking == [] and result.is_whole


def test_finalists_differ() -> None:
    """Not two that the simulator cannot tell apart, and few of a preset; of equals the simplest."""
    result, _ = found()
    names = [one.system.name for one in finalists(result.ranking, 4, 2, lambda _: True)]
    assert [name.split(":")[0] for name in names].count("lfu") == 2
    clock = FakeClock()
    same = search(SEEDS, vary, lambda one, num, until: 1.0, 1, Deadline.after(clock, 1e9))
    assert [one.system.name for one in finalists(same.ranking, 4, 2, lambda _: True)] == ["lcp"]


def test_what_nobody_measured_does_not_take_every_place() -> None:
    """It looks better than it is: half of the places are for what is known, if there is any."""
    names = ["lru:prediction=lookahead", "lfu:prediction=lookahead", "moepic", "adapmoe", "lcp", "lfu", "static"]
    ranking = [Scored(candidate(name), 1.0 + number, 8) for number, name in enumerate(names)]

    def places(*known: str) -> list[str]:
        return [one.system.name for one in finalists(ranking, 4, 2, lambda one: one.system.name in known)]

    assert places("lcp", "lfu", "static") == [*names[:2], "lcp", "lfu"]
    assert places("lcp") == [*names[:3], "lcp"], "in the order of the ranking"
    assert places() == names[:4] == places(*names), "where all are equally unsure"


def test_one_request_is_one_rung() -> None:
    assert rungs_of(1) == [1]
    assert found(num_requests=1)[0].ranking[0].candidate.system.name == "lfu:segments=8"
