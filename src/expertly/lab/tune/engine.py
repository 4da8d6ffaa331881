"""What tuning does with the engine: record the user's prompts, measure the model on this machine, run candidates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from expertly import api
from expertly.core.errors import ConfigError, ExpertlyError, ModelUseError
from expertly.engine.device import kind_of
from expertly.engine.memory import available_host_nbytes
from expertly.hardware.measure import store_costs
from expertly.lab.model_profile import ModelProfile, compressed_costs, measure_model
from expertly.lab.playing import Played, RecordedRequest, answer, chooser, feed, learn, recorded_requests
from expertly.lab.prompts import Prompt, asked
from expertly.lab.recording import record
from expertly.lab.tune.search import Candidate, Deadline
from expertly.model.generation import max_positions
from expertly.policies.allocation.moepic import SplitPlan
from expertly.sim.hardware import Hardware
from expertly.sim.schedule import Schedule, Selection, make_schedule
from expertly.store.packed import PackedStore
from expertly.trace.reader import Trace

# -- the workload ----------------------------------------------------------------------------------------------------


SPLIT = (1, 1)
"""The shares of the requests that systems learn from, and that they are tried on."""

LEAST_REQUESTS = 2
LEAST_NEW_TOKENS = 8

TEMPERATURE = 0.8
"""Greedy answers of small models go round in circles, and route alike all the time."""


@dataclass(frozen=True, slots=True)
class TunedWorkload:
    """The recorded requests, which of them systems learn from, and which they are tried on."""

    trace: Trace
    schedule: Schedule
    requests: tuple[RecordedRequest, ...]  # of `schedule.test`
    num_requests: int
    num_left_out: int  # prompts, for want of time or because the model cannot take them
    absent: dict[str, str]  # fields that could not be recorded, with reasons


def record_workload(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    folder: Path,
    *,
    max_new_tokens: int,
    seed: int,
    deadline: Deadline,
    command: str = "",
    is_raw: bool = False,
) -> TunedWorkload:
    """Record the model's answers to the prompts, in turn and sampled with the seed, as many as time allows and at least
    two.

    Raises ConfigError where fewer than two prompts give tokens that the model can take; ModelUseError for
    encoder-decoder models.
    """
    if model.config.is_encoder_decoder:
        raise ModelUseError("an encoder-decoder model's passes are of two kinds: it cannot be tuned yet")
    limit = max_positions(model)
    most = max_new_tokens if limit is None else min(max_new_tokens, limit // 2)
    fitting, _ = asked(prompts, tokenizer, is_raw=is_raw, most=None if limit is None else limit - most)
    if len(fitting) < LEAST_REQUESTS:
        accepted = f"at least {LEAST_REQUESTS}" + ("" if limit is None else f" of at most {limit - most} tokens")
        raise ConfigError(f"prompts: {len(fitting)} of {len(prompts)} can be given to this model; accepted: {accepted}")
    choose, num_done = chooser(TEMPERATURE, seed), 0
    with record(model, folder, full=True, command=command) as recording:
        for number, one in enumerate(fitting):
            if number >= LEAST_REQUESTS and deadline.is_over:
                break
            its = deadline.share(1 / (len(fitting) - number))
            recording.begin_request(one.prompt.category, one.prompt.text, len(one.tokens))
            answer(model, one.tokens, most + 1, choose, partial(_may_go_on, its))
            num_done += 1
    trace = Trace.open(folder)
    schedule = make_schedule(trace, Selection(split=SPLIT, seed=seed))
    return TunedWorkload(
        trace,
        schedule,
        tuple(recorded_requests(trace, schedule)),
        num_done,
        len(prompts) - num_done,
        recording.absent,
    )


def _may_go_on(deadline: Deadline, num_tokens: int) -> bool:
    return num_tokens <= LEAST_NEW_TOKENS or not deadline.is_over


# -- the machine -----------------------------------------------------------------------------------------------------


TOKENS = (1, 64)
"""Passes that are measured, by their tokens: a decode step and a prompt. Others are interpolated."""


def measure_hardware(
    model: Any,
    other: Callable[[], Any],
    stores: Mapping[str, PackedStore],
    seconds: float,
    machine: Callable[[], Hardware],
) -> tuple[Hardware, str]:
    """The machine as the simulator needs it, and where its times come from, in words. Takes about `seconds`, and at
    least one round of every measurement.

    `other` loads the model with a memory budget under which it can be measured, for where it cannot be under this one.
    `stores` are the model's packed stores by codec. `machine` measures the machine without the model: it is called for
    what lies behind an accelerator, and where the model cannot be measured at all.
    """
    is_hosted = not kind_of(model.device).runs_on_host
    hardware = machine() if is_hosted else Hardware.read("infinite")
    about = "the times of this model's layers, experts and loads, measured here"
    costs = hardware.codec
    try:
        measured = _measured(model, other, seconds)
    except (ConfigError, ModelUseError) as error:
        hardware = hardware if is_hosted else machine()
        about = f"the rates of this machine, as the model's own times cannot be measured: {error}"
        compressed = None
    else:
        hardware = hardware.with_model(measured.link, measured.compute, measured.predictor)
        compressed = compressed_costs(model, measured)
    if compressed is not None:
        hardware, costs = hardware.with_disk(compressed[0]), compressed[1]
    elif "planes" in stores:
        _, costs = store_costs(stores["planes"])
    return replace(hardware, name="this machine", codec=costs), about


def _measured(model: Any, other: Callable[[], Any], seconds: float) -> ModelProfile:
    """Measure the model; where its budget keeps all experts or hardly any, measure one that `other` loads instead."""
    try:
        return measure_model(model, seconds, TOKENS)
    except ConfigError:
        beside = other()
        try:
            return measure_model(beside, seconds, TOKENS)
        finally:
            api.unload(beside)


# -- candidates ------------------------------------------------------------------------------------------------------


BESIDE_NBYTES = 256 << 20
"""What a loaded model takes beside dense weights and experts: KV cache and activations."""

Load = Callable[..., tuple[Any, Any]]


class EnginePlayer:
    """Runs requests on candidates. A candidate is loaded when it is first run, and again where memory was needed for
    others. After loading it learns from the training part and runs the workload's first request, which fills its
    caches. A context manager: leaving it unloads all.
    """

    def __init__(
        self,
        workload: TunedWorkload,
        memory_nbytes: int,
        plan: Callable[[Candidate], SplitPlan | None],
        load: Load,
        scratch: Path,
    ) -> None:
        """`load` takes the arguments of `expertly.load` in which candidates differ; what they learn is saved in
        `scratch`.
        """
        self._workload = workload
        self._memory_nbytes = memory_nbytes
        self._plan = plan
        self._load = load
        self._scratch = scratch
        self._models: dict[Candidate, Any] = {}  # the one that was played longest ago first

    def __enter__(self) -> EnginePlayer:
        return self

    def __exit__(self, *_: object) -> None:
        while self._models:
            self._drop_oldest()

    def play(self, candidate: Candidate, request: RecordedRequest) -> Played:
        model = self._models.pop(candidate, None)
        if model is None:
            model = self._loaded(candidate)
        self._models[candidate] = model
        return feed(model, request.tokens, request.num_prompt)

    def maps(self, candidate: Candidate) -> Path:
        """The file that a candidate's learned state is saved in when it is unloaded."""
        safe = "".join(letter if letter.isalnum() else "-" for letter in candidate.label)
        return self._scratch / f"{safe[:150]}.learned"

    def _loaded(self, candidate: Candidate) -> Any:
        while self._models and not self._has_room(next(iter(self._models.values()))):
            self._drop_oldest()
        system = candidate.system
        model, _ = self._load(
            system=system.name,
            memory=self._memory_nbytes,
            plan=self._plan(candidate),
            learned=str(self.maps(candidate)) if system.learns is not None else None,
            codec=candidate.codec,
        )
        if system.learns is not None and not self.maps(candidate).exists():
            learn(model, self._workload.trace, self._workload.schedule)
        first = self._workload.requests[0]
        feed(model, first.tokens, first.num_prompt)
        return model

    def _has_room(self, other: Any) -> bool:
        """Whether one more candidate fits into memory beside what is loaded; `other` is one of the loaded models."""
        store, device = api.handle(other).store, other.device
        needed = self._memory_nbytes + store.dense_nbytes + BESIDE_NBYTES
        if not kind_of(device).runs_on_host and available_host_nbytes() < store.experts_nbytes:
            return False
        return kind_of(device).available_nbytes(device) > needed

    def _drop_oldest(self) -> None:
        oldest = next(iter(self._models))
        with suppress(ExpertlyError):  # a file of maps that cannot be written is no reason to stop
            api.unload(self._models.pop(oldest))
