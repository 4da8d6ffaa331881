"""Finds the fastest system for a model, its prompts and this machine: record, measure, search, verify, choose."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from expertly import api
from expertly.core.costs import CODECS
from expertly.core.errors import StoreError
from expertly.core.files import disk_errors, write_atomic
from expertly.engine.choice import TunedChoice, TunedOn, choices_path, in_codec, save_choice, this_machine
from expertly.engine.learned import find_weights
from expertly.lab.playing import RecordedRequest
from expertly.lab.prompts import Prompt
from expertly.lab.tune.engine import EnginePlayer, TunedWorkload, measure_hardware, record_workload
from expertly.lab.tune.search import Candidate, Clock, Deadline, SearchResult, Simulation, Space, finalists, search
from expertly.lab.tune.settings import TuneOptions
from expertly.lab.tune.verdict import Calibration, CandidatePlayer, Verdict, calibrate, decide, representatives
from expertly.model.packing import pack_cached
from expertly.policies.learned import LearnedState
from expertly.scheduler.presets import BASE_SYSTEM, SYSTEMS, default_system, get_system, without_prediction
from expertly.sim.hardware import Hardware
from expertly.sim.study import Progress
from expertly.store.cache import learned_beside
from expertly.store.packed import PackedStore, is_packed_store

FINALISTS, OF_A_PRESET = 4, 2

RECORDING, CALIBRATING, SEARCHING = 0.15, 0.15, 0.4
"""The share of the remaining time that each stage may take; simulating the presets and running the best of them count
as one stage each.
"""

MEASURING, MEASURING_S = 0.08, 20.0
"""The share of all the time that measuring may take, and the most seconds."""

RESERVED_SHARE = 0.06
"""The share of the time that is left for saving, and for a last turn that takes longer than the ones before."""


@dataclass(frozen=True, slots=True)
class Observed:
    """The recorded workload and the measured machine."""

    workload: TunedWorkload
    hardware: Hardware
    times: str  # where those of the hardware are from
    machine: TunedOn
    memory_nbytes: int  # for experts
    memory_reason: str


@dataclass(frozen=True, slots=True)
class Tuned:
    """What was chosen, and all that led to it."""

    choice: TunedChoice
    verdict: Verdict
    base: Candidate
    default: Candidate
    store: PackedStore
    seen: Observed
    calibration: Calibration
    found: SearchResult
    seconds: dict[str, float]  # of each stage


MakePlayer = Callable[[EnginePlayer], CandidatePlayer]
MeasureMachine = Callable[[], Hardware]


def tune(
    options: TuneOptions,
    prompts: Sequence[Prompt],
    machine: MeasureMachine,
    *,
    command: str = "",
    clock: Clock = time.monotonic,
    begin: float | None = None,
    progress: Progress | None = None,
    loading: Progress | None = None,
    make_player: MakePlayer = lambda player: player,
) -> Tuned:
    """Find the best choice; `save` writes it. `options.time_limit`, in seconds, counts from `begin` on the clock
    (default: now). Packing, loading and one round of measuring are never cut short.

    `machine` measures the machine where the model's own times cannot be measured; `loading` is told of bytes that are
    packed and loaded, as by `expertly.load`; `make_player` may replace the engine.

    Raises ExpertlyError subclasses that name what is wrong with the model, the memory or the prompts.
    """
    running = _Tuning(options, command, clock, clock() if begin is None else begin, progress, loading)
    packing = None if loading is None else partial(loading, "packing")
    store = pack_cached(options.model, options.dtype, progress=packing, codec=options.codec)
    running.end("packing")
    weights = _weights(options.predictor, store)
    stores = _packed(store, options.codec)
    with TemporaryDirectory(prefix="expertly-tune-") as name:
        scratch = Path(name)
        seen = running.observed(prompts, stores, machine, scratch / "trace")
        space = Space(
            store.manifest.layers,
            seen.memory_nbytes,
            list(stores),
            list(seen.workload.trace.manifest.fields),
            has_weights=weights is not None,
        )
        simulation = Simulation(
            seen.workload.trace, seen.workload.schedule, seen.hardware, seen.memory_nbytes, weights, options.seed
        )
        base = space.named(BASE_SYSTEM)
        usual, _ = default_system(store.manifest.layers)
        if not space.can_run(get_system(usual)):  # it would run so
            usual = without_prediction(get_system(usual)).name
        default = space.named(usual) if space.can_run(get_system(usual)) else base
        requests = seen.workload.requests
        with EnginePlayer(seen.workload, seen.memory_nbytes, simulation.plan, running.loaded, scratch) as player:
            calibration = running.calibrated(space, simulation, make_player(player), base, requests[0])
            running.end("calibrating")
            found = running.searched(space, simulation, calibration, len(requests))
            best = _worth_it(found, base, calibration)
            running.end("searching")
            if found.ranking:
                verdict = decide(make_player(player), best, base, default, requests, running.deadline, progress)
            else:
                verdict = Verdict(base, "there was no time left to search", is_verified=False)
        running.end("verifying")
        choice = replace(running.choice(verdict, simulation, seen), gains=verdict.gains([default, base]))
        if verdict.is_verified:
            keep_learned(player.maps(verdict.chosen), choice.system, store)
    return Tuned(choice, verdict, base, default, store, seen, calibration, found, running.seconds)


class _Tuning:
    """The stages, what they share, and how long each took."""

    def __init__(
        self,
        options: TuneOptions,
        command: str,
        clock: Clock,
        begin: float,
        progress: Progress | None,
        loading: Progress | None,
    ) -> None:
        self.deadline = Deadline(clock, begin + (1 - RESERVED_SHARE) * options.time_limit)
        self.seconds: dict[str, float] = {}
        self._options, self._command, self._begin = options, command, begin
        self._tell: Progress = progress or (lambda what, done, total: None)
        self._load = partial(api.load, options.model, dtype=options.dtype, device=options.device, progress=loading)

    def end(self, stage: str) -> None:
        now = self.deadline.clock()
        self.seconds[stage], self._begin = now - self._begin, now

    def loaded(self, system: str, **others: Any) -> tuple[Any, Any]:
        """Load a system, with trained weights where it uses some."""
        weights = self._options.predictor if get_system(system).takes_weights else "off"
        return self._load(system=system, predictor=weights, **others)

    def observed(
        self,
        prompts: Sequence[Prompt],
        stores: Mapping[str, PackedStore],
        machine: MeasureMachine,
        folder: Path,
    ) -> Observed:
        """Load the model once, record and measure. Where there is a choice it is loaded uncompressed, because then
        loads can be measured apart from decoding.
        """
        options, codec = self._options, "none" if "none" in stores else next(iter(stores))
        load = partial(self._load, system=BASE_SYSTEM, learned=None, codec=codec)
        self._tell("recording", 0, 1)
        model, tokenizer = load(memory=options.memory, total_memory=options.total_memory)
        try:
            workload = record_workload(
                model,
                tokenizer,
                prompts,
                folder,
                max_new_tokens=options.max_new_tokens,
                seed=options.seed,
                deadline=self.deadline.share(RECORDING),
                command=self._command,
                is_raw=options.raw,
            )
            self.end("recording")
            self._tell("measuring", 0, 1)
            seconds = min(MEASURING_S, MEASURING * options.time_limit)
            hardware, times = measure_hardware(model, lambda: load(memory="50%")[0], stores, seconds, machine)
            memory_nbytes = api.handle(model).engine.scheduler.budget.memory_nbytes
            here, reason = this_machine(model.device), api.stats(model).memory_reason
        finally:
            api.unload(model)
        self.end("measuring")
        return Observed(workload, hardware, times, here, memory_nbytes, reason)

    def calibrated(
        self, space: Space, simulation: Simulation, player: CandidatePlayer, base: Candidate, request: RecordedRequest
    ) -> Calibration:
        """Simulate a request under each preset, and run the best of them to measure what the simulator leaves out."""
        scored: dict[Candidate, float] = {}
        simulating = self.deadline.share(CALIBRATING)
        for candidate in dict.fromkeys([base, *space.presets()]):
            self._tell(f"simulating {candidate.label}", 0, 1)
            seconds = None if simulating.is_over else simulation.score(candidate, 1, simulating)
            if seconds is not None:
                scored[candidate] = seconds
        if base not in scored:
            return Calibration(base)
        steps = max(1, simulation.num_steps(1))
        return calibrate(
            player,
            base,
            representatives(scored.items(), base, scored[base]),
            lambda candidate: scored[candidate] / steps if candidate in scored else None,
            request,
            self.deadline.share(CALIBRATING),
        )

    def searched(
        self, space: Space, simulation: Simulation, calibration: Calibration, num_requests: int
    ) -> SearchResult:
        num_tried = 0

        def score(candidate: Candidate, num: int, until: Deadline) -> float | None:
            nonlocal num_tried
            num_tried += 1
            self._tell(f"searching, {num_tried} tried", 0, 1)
            seconds = simulation.score(candidate, num, until)
            return None if seconds is None else seconds + calibration.overhead_s(candidate) * simulation.num_steps(num)

        seeds = dict.fromkeys([calibration.base, *space.presets()])
        return search(list(seeds), space.variations, score, num_requests, self.deadline.share(SEARCHING))

    def choice(self, verdict: Verdict, simulation: Simulation, seen: Observed) -> TunedChoice:
        chosen, options = verdict.chosen, self._options
        is_named = chosen.system.takes_weights and options.predictor not in ("auto", "off")
        return TunedChoice(
            system=chosen.system.name,
            segments=simulation.segments(chosen),
            memory_nbytes=seen.memory_nbytes,
            codec=chosen.codec,
            machine=seen.machine,
            plan=simulation.plan(chosen),
            predictor=str(Path(options.predictor).expanduser().absolute()) if is_named else None,
            about={
                "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                "command": self._command[:1000],
                "memory": options.memory if options.total_memory is None else f"total {options.total_memory}",
                "requests": seen.workload.num_requests,
                "tokens": seen.workload.trace.num_rows,
                "times": seen.times[:1000],
            },
        )


def _packed(store: PackedStore, codec: str) -> dict[str, PackedStore]:
    """The model's packed stores by codec: this one, and where the user named no codec, those that exist already."""
    others = [one for one in CODECS if one != store.codec and codec == "auto"]
    if store.folder != in_codec(store, store.codec):
        others = []
    found = {one: in_codec(store, one) for one in others}
    there = {one: PackedStore.open(folder) for one, folder in found.items() if is_packed_store(folder)}
    return {store.codec: store} | there


def _weights(predictor: str, store: PackedStore) -> LearnedState | None:
    """The trained weights that the first system with a learned predictor would use, if there are any."""
    taker = next((system for system in SYSTEMS.values() if system.takes_weights), None)
    return None if taker is None else find_weights(predictor, taker, store)


def _worth_it(found: SearchResult, base: Candidate, calibration: Calibration) -> list[Candidate]:
    """The best few that should be faster than the base and did not fail in calibration."""
    scores = {one.num_requests: one.seconds for one in found.ranking if one.candidate == base}
    ran = [one for one in found.ranking if one.candidate not in calibration.failed]
    faster = [one for one in ran if one.seconds < scores.get(one.num_requests, float("inf"))]
    return finalists(faster, FINALISTS, OF_A_PRESET, lambda one: not calibration.unmeasured(one))


def keep_learned(learned: Path, system: str, store: PackedStore) -> None:
    """Copy what the system learned while tuning to where `expertly.load` looks for it, unless something is there.
    Raises StoreError where that cannot be written.
    """
    kind = get_system(system).learns
    if kind is not None and learned.exists() and not os.path.lexists(there := learned_beside(store.folder, kind)):
        with disk_errors(there, "saving what was learned", StoreError, ""):
            write_atomic(there, learned.read_bytes())


def save(tuned: Tuned) -> Path | None:
    """Write the choice beside the store, where system `auto` finds it, and return the path. Writes nothing and returns
    None where the choice was not verified. Raises StoreError.
    """
    if not tuned.verdict.is_verified:
        return None
    path, manifest = choices_path(tuned.store), tuned.store.manifest
    save_choice(path, manifest.identity, manifest.stored_as, tuned.choice)
    return path
