"""What can be asked for, and what cannot."""

from __future__ import annotations

import pytest

from expertly.core.errors import ConfigError
from expertly.reproduce.experiment import PAPERS
from expertly.reproduce.registry import EXPERIMENTS, select


def names(asked: str) -> list[str]:
    return [one.name for one in select(asked)]


def test_a_figure_a_paper_or_all() -> None:
    assert names("all") == list(EXPERIMENTS)
    assert names("moepic:table-1") == ["moepic:table-1"]
    assert names("promoe:14") == ["promoe:13"], "a figure of a group is found by its own number"
    assert names("moepic:6,fmoe:4") == ["fmoe:4", "moepic:6"]
    assert all(name.startswith("fmoe:") for name in names("fmoe"))


@pytest.mark.parametrize(
    ("asked", "accepted"),
    [("gmoe", "moe-infinity"), ("fmoe:99", "12a"), ("", "all"), ("fmoe:", "12a"), ("moepic:table-9", "table-3")],
)
def test_unknown_names_are_refused_with_what_is_accepted(asked: str, accepted: str) -> None:
    with pytest.raises(ConfigError, match=accepted):
        select(asked)


def test_every_figure_is_said_once_and_has_the_papers_words() -> None:
    for paper in PAPERS:
        figures = [figure for one in EXPERIMENTS.values() if one.paper == paper for figure in one.figures]
        assert len(figures) == len(set(figures)) and figures
    assert all(one.shows and one.title and one.where for one in EXPERIMENTS.values())


FIGURES = {
    "fmoe": "3a 3b 3c 4 8 9 10 11 12a 12b 13 14a 14b 15 16",
    "moe-infinity": "2 4 table-2 7 table-1 8 9 table-3 B.1",
    "promoe": "3 4 5 8 9 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25",
    "moepic": "table-1 2a 2b 2c 2d 4a 4b 6 7 8 table-3 9",
}
"""What must have a result."""


@pytest.mark.parametrize("paper", FIGURES)
def test_every_figure_that_must_have_a_result_has_an_experiment(paper: str) -> None:
    assert [names(f"{paper}:{figure}")[0].partition(":")[0] for figure in FIGURES[paper].split()]
