"""What the simulator leaves out: predicting and choosing take time of the processor that computes. It is measured on
the engine for each kind of predictor and eviction that looks promising, a request beside the base, and added.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from expertly.core.errors import ExpertlyError
from expertly.lab.playing import Played, RecordedRequest
from expertly.lab.tune.candidates import Candidate
from expertly.lab.tune.deadline import Deadline
from expertly.lab.tune.verification import CandidatePlayer

QUIET = 0.25
"""Of the steps of a request those that take least, in which nothing else ran: the longest of them counts."""

Kind = tuple[str, str]
"""Of a part, "prediction" or "eviction": which it is."""


@dataclass(slots=True)
class Calibration:
    """Seconds of a decode step beyond the simulated ones, by what predicts and what evicts, relative to the base."""

    base: Candidate
    overheads_s: dict[Kind, float] = field(default_factory=dict)
    failed: dict[Candidate, str] = field(default_factory=dict)

    def overhead_s(self, candidate: Candidate) -> float:
        """Of a step; what was not measured counts as nothing, and what is measured at last shows it."""
        return sum(self.overheads_s.get(kind, 0.0) for kind in kinds_of(candidate))

    def unmeasured(self, candidate: Candidate) -> list[Kind]:
        """What it is of that nobody knows the overhead of: there was no time, it failed, or no preset is of it."""
        known = kinds_of(self.base)
        return [kind for kind in kinds_of(candidate) if kind not in known and kind not in self.overheads_s]


def kinds_of(candidate: Candidate) -> list[Kind]:
    system = candidate.system
    if system.keeps_everything:
        return [("eviction", "none")]
    gated = "" if system.gate == "none" else f", gate {system.gate}"  # which may spare some of the predicting
    return [("eviction", system.eviction), ("prediction", system.prediction + gated)]


def representatives(scored: Collection[tuple[Candidate, float]], base: Candidate, base_s: float) -> list[Candidate]:
    """Of each kind that the base is not of, the one that was simulated to be fastest, if that is faster than the base,
    as nothing that is left out makes it so: evictions by systems that do not predict, where there are any. The fastest
    come first: where there is no time for all, it is for those that would be taken for the best.
    """
    found: dict[Kind, Candidate] = {}
    known = set(kinds_of(base))
    in_order = sorted(scored, key=lambda pair: (pair[0].system.prediction != "none", pair[1], pair[0].complexity))
    for candidate, seconds in in_order:
        new = [kind for kind in kinds_of(candidate) if kind not in known and kind not in found]
        if new and seconds < base_s:
            found |= dict.fromkeys(new, candidate)
    chosen = set(found.values())
    return [one for one, _ in sorted(scored, key=lambda pair: (pair[1], pair[0].complexity)) if one in chosen]


def calibrate(
    player: CandidatePlayer,
    base: Candidate,
    candidates: Sequence[Candidate],
    simulated_step_s: Callable[[Candidate], float | None],
    request: RecordedRequest,
    deadline: Deadline,
) -> Calibration:
    """Each is played between two times of the base, the slower of which counts, so that noise is no overhead. What
    fails is left out, as is what there is no time for: that has no overhead then, which is never less than nothing. Of
    a candidate of two kinds, the prediction has what the eviction does not explain, whichever was played first. A
    request without a step tells nothing.
    """
    calibration = Calibration(base)
    base_s = simulated_step_s(base)
    if len(request.tokens) == request.num_prompt:
        return calibration
    beyond_s: dict[Candidate, float] = {}
    before_s = _quiet_step_s(player.play(base, request))
    for candidate in candidates:
        if deadline.is_over or base_s is None:
            break
        try:
            played = player.play(candidate, request)
        except ExpertlyError as error:
            calibration.failed[candidate] = str(error)
            continue
        simulated = simulated_step_s(candidate)
        if simulated is None:
            continue
        after_s = _quiet_step_s(player.play(base, request))
        measured, before_s = _quiet_step_s(played) - max(before_s, after_s), after_s
        beyond_s[candidate] = measured - (simulated - base_s)
    for candidate in sorted(beyond_s, key=lambda one: one.system.prediction != "none"):
        unknown = calibration.unmeasured(candidate)
        if unknown:
            explained_s = calibration.overhead_s(candidate)
            calibration.overheads_s[unknown[-1]] = max(0.0, beyond_s[candidate] - explained_s)
    return calibration


def _quiet_step_s(played: Played) -> float:
    steps = sorted(played.steps_s)
    return steps[int(QUIET * (len(steps) - 1))]
