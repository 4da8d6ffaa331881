"""Which of the best few is taken, by what was measured: all of them in a heat, and the best of it against what nothing
may be slower than once more, so that luck in the heat is no reason to be taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from expertly.engine.choice import Gain
from expertly.lab.playing import RecordedRequest
from expertly.lab.tune.candidates import Candidate
from expertly.lab.tune.deadline import Deadline
from expertly.lab.tune.verification import MIN_TURNS, CandidatePlayer, Progress, Turns, is_faster, take_turns

WANTED_PLAYS = 60
"""Requests that are run in all, if that can be done by cutting them short."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """`final` and `heat`: what was measured; None: it was not run. `is_verified`: whether there was time to."""

    chosen: Candidate
    why: str
    is_verified: bool
    final: Turns | None = None
    heat: Turns | None = None
    failed: dict[Candidate, str] = field(default_factory=dict)

    def gains(self, over: Sequence[Candidate]) -> tuple[Gain, ...]:
        """Of the choice, over each of these that it is not and that ran beside it."""
        turns = self.final or self.heat
        if turns is None or self.chosen not in turns.played:
            return ()
        others = [one for one in dict.fromkeys(over) if one != self.chosen and one in turns.played]
        return tuple(turns.gain(self.chosen, other) for other in others)


def decide(
    player: CandidatePlayer,
    found: Sequence[Candidate],
    base: Candidate,
    default: Candidate,
    requests: Sequence[RecordedRequest],
    deadline: Deadline,
    progress: Progress | None = None,
) -> Verdict:
    """The fastest of what was found and the default, if it is measurably faster than `base`, else `base`. As many of
    `found`, the best first, as there is time for run at all. Raises what running `base` raises; of the others, those
    that fail are left out.
    """
    if deadline.is_over:
        return Verdict(base, "there was no time left to verify anything", is_verified=False)
    load_s, turn_s = (_seconds(player, base, requests[-1], deadline) for _ in range(2))
    share = deadline.left_s / max(turn_s * WANTED_PLAYS, 1e-9)
    if share < 1:  # on a slow machine short answers, rather than few
        requests = [request.cut(share) for request in requests]
        turn_s = _seconds(player, base, requests[-1], deadline)
    others = [one for one in dict.fromkeys([*found, default]) if one != base]
    room = int((deadline.left_s - 3 * MIN_TURNS * turn_s) // (load_s + MIN_TURNS * turn_s)) - 1
    if len(others) > max(1, room):
        kept = found[: max(1, room - 1)]
        others = [one for one in dict.fromkeys([*kept, default] if room > 1 else kept or [default]) if one != base]
    heat: Turns | None = None
    failed: dict[Candidate, str] = {}
    if len(others) > 2 or (len(others) == 2 and default not in others):
        heat = take_turns(player, base, others, requests, deadline.share(0.5), progress)
        failed |= heat.failed
        ran = [one for one in others if one not in failed]
        ran.sort(key=lambda one: heat.gain(one, base).ratio)
        if ran and heat.count >= MIN_TURNS and heat.gain(ran[0], base).ratio >= 1:
            return Verdict(base, _why_base(base, heat), heat.count >= MIN_TURNS, heat=heat, failed=failed)
        others = [one for one in dict.fromkeys([*ran[:1], default]) if one != base and one not in failed]
    final: Turns | None = None
    if others:
        final = take_turns(player, base, others, requests, deadline, progress)
        failed |= final.failed
    if final is None or len(failed.keys() & set(others)) == len(others):
        why = "nothing else could be run" if failed else "nothing was simulated to be faster"
        return Verdict(base, f"{base.label}: {why}", is_verified=True, heat=heat, failed=failed)
    ran = sorted((one for one in others if one not in failed), key=lambda one: final.gain(one, base).ratio)
    for one in ran:
        gain = final.gain(one, base)
        if is_faster(gain):
            why = f"{one.label}: {gain.ratio:.3f}x the time of {base.label} in {gain.num_turns} turns"
            return Verdict(one, why, True, final, heat, failed)
    return Verdict(base, _why_base(base, final), final.count >= MIN_TURNS, final, heat, failed)


def _seconds(player: CandidatePlayer, candidate: Candidate, request: RecordedRequest, deadline: Deadline) -> float:
    begin = deadline.clock()
    player.play(candidate, request)
    return deadline.clock() - begin


def _why_base(base: Candidate, turns: Turns) -> str:
    if turns.count < MIN_TURNS:
        return f"{base.label}: there was time for too few turns to say anything ({turns.count} of {MIN_TURNS})"
    return f"{base.label}: nothing was measurably faster in {turns.count} turns"
