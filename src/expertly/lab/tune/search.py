"""Successive halving over candidates: many are scored on a little of the workload, the best on more of it (Jamieson and
Talwalkar, AISTATS 2016). On each rung the best are varied, so that what is found there goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from expertly.lab.tune.candidates import Candidate
from expertly.lab.tune.deadline import Deadline

Score = Callable[[Candidate, int, Deadline], float | None]
"""Seconds that so many requests take; None: it cannot run, or the time was up."""

Vary = Callable[[Candidate], Iterable[Candidate]]

KEPT = (12, 8)
"""Candidates that go on, from the first rungs."""

VARIED = 4
"""Of the best of a rung, those that are varied."""

ROUNDS = 3
"""Of varying on one rung, at most: each from what the one before found."""

_SHARES = (0.6, 0.6, 1.0)


@dataclass(frozen=True, slots=True)
class Scored:
    """A candidate, and the seconds that `num_requests` of the workload take with it."""

    candidate: Candidate
    seconds: float
    num_requests: int


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The best first, those that were scored on most requests before the others; how many were tried, and whether all
    that was to be tried was.
    """

    ranking: list[Scored]
    num_scored: int
    is_whole: bool


def rungs_of(num_requests: int) -> list[int]:
    """Requests that are simulated on each rung: a quarter, half and all of them."""
    return sorted({max(1, num_requests // 4), max(1, num_requests // 2), num_requests})


def search(seeds: Sequence[Candidate], vary: Vary, score: Score, num_requests: int, deadline: Deadline) -> SearchResult:
    """The order in which candidates are tried depends on nothing but scores, so that what is found does not change from
    run to run but by how far time goes. The first of the seeds is scored on every rung, first. What stays when time is
    up is ranked.
    """
    scores: dict[tuple[Candidate, int], float] = {}
    is_whole, pool = True, list(dict.fromkeys(seeds))
    first = pool[0]
    rungs = rungs_of(num_requests)
    for number, rung in enumerate(rungs):
        until = deadline.share(_SHARES[len(_SHARES) - len(rungs) + number])

        def score_all(candidates: Iterable[Candidate], rung: int = rung, until: Deadline = until) -> None:
            nonlocal is_whole
            for candidate in candidates:
                if (candidate, rung) in scores:
                    continue
                if until.is_over:
                    is_whole = False
                    return
                seconds = score(candidate, rung, until)
                if seconds is not None:
                    scores[candidate, rung] = seconds

        score_all(pool)
        varied: set[Candidate] = set()
        for _ in range(1 if number and rung == num_requests else ROUNDS):
            parents = [one for one in _best(scores, rung)[:VARIED] if one not in varied]
            varied.update(parents)
            children = [list(vary(parent)) for parent in parents]
            score_all(dict.fromkeys(_in_turn(children)))
        best = _best(scores, rung)[: KEPT[min(number, len(KEPT) - 1)]]
        pool = list(dict.fromkeys([first, *best])) if best else pool
    ranking: dict[Candidate, Scored] = {}
    for rung in reversed(rungs):
        for candidate in _best(scores, rung):
            ranking.setdefault(candidate, Scored(candidate, scores[candidate, rung], rung))
    return SearchResult(list(ranking.values()), len(ranking), is_whole)


def finalists(
    ranking: Sequence[Scored], limit: int, each: int, is_known: Callable[[Candidate], bool] = lambda _: True
) -> list[Candidate]:
    """The best `limit` candidates that are worth running: no two that the simulator cannot tell apart, and at most
    `each` made of one preset, as its times are less sure between systems than within one. Those that are not known to
    be as fast as simulated have half of the places, and what the others leave.
    """
    chosen: list[Scored] = []
    seen: set[tuple[int, float]] = set()
    by_preset: dict[str, int] = {}
    left = {True: limit, False: limit // 2}
    for only_half in (True, False):
        for one in ranking:
            preset = one.candidate.system.name.split(":")[0]
            key, known = (one.num_requests, one.seconds), is_known(one.candidate) or not only_half
            if key in seen or by_preset.get(preset, 0) >= each or len(chosen) == limit or not left[known]:
                continue
            seen.add(key)
            by_preset[preset] = by_preset.get(preset, 0) + 1
            left[known] -= 1
            chosen.append(one)
    return [one.candidate for one in ranking if one in chosen]


def _best(scores: dict[tuple[Candidate, int], float], rung: int) -> list[Candidate]:
    of_rung = [(seconds, one) for (one, its), seconds in scores.items() if its == rung]
    return [one for _, one in sorted(of_rung, key=lambda pair: (pair[0], pair[1].complexity))]


def _in_turn(lists: Sequence[Sequence[Candidate]]) -> Iterable[Candidate]:
    """The first of each, the second of each: when time is up, none has had all of it."""
    for number in range(max(map(len, lists), default=0)):
        yield from (one[number] for one in lists if number < len(one))
