"""Small traces with a session on them, and experiments that are told other numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from expertly.lab.papers.findings import Finding
from expertly.lab.papers.runner import Session, find_experiment
from expertly.lab.papers.runs import Lab, Row, Runs
from tests.lab.papers.small import full_trace, imported_trace, quick_session


@pytest.fixture(scope="package")
def traces(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("traces")
    return [one(folder / name).folder for one, name in ((full_trace, "full"), (imported_trace, "bare"))]


@pytest.fixture(scope="package")
def session(traces: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Session:
    return quick_session(traces, tmp_path_factory.mktemp("scratch"))


@pytest.fixture(scope="package")
def lab(session: Session) -> Lab:
    """Of the full trace."""
    return session.lab(session.subjects[0])


@pytest.fixture(scope="package")
def bare(session: Session) -> Lab:
    """Of imported routing."""
    return session.lab(session.subjects[1])


@pytest.fixture
def told(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Finding]:
    """What an experiment finds where systems, on machines and with memory, take so many times as long, and hit so
    often, as is said.
    """
    base = lab.runs("rtx3090").row("lru")

    def find(
        name: str,
        slower: Callable[[str, str], float] = lambda system, machine: 1.0,
        hits: Callable[[str], float] = lambda system: 0.5,
        squeezed: Callable[[str, str], float] = lambda system, memory: 1.0,
    ) -> Finding:
        def row(self: Runs, system: str, memory: object = None) -> Row:
            facts = {key: value if value is not None else 0 for key, value in base.facts.items()}
            by_request = [hits(system)] * len(base["hit_rate_by_request"])
            facts |= {"predictor": {}, "hit_rate": hits(system), "hit_rate_by_request": by_request}
            times = base.passes_s * slower(system, self.hardware) * squeezed(system, str(memory))
            return replace(base, system=system, facts=facts, passes_s=times, on_faster_link=None)

        monkeypatch.setattr(Runs, "row", row)
        return find_experiment(name).run(lab)

    return find
