"""A short recording of what the user's prompts make a model do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from expertly.core.errors import ConfigError, ModelUseError
from expertly.lab.playing import RecordedRequest, answer, chooser, recorded_requests
from expertly.lab.prompts import Prompt, asked, has_template
from expertly.lab.recording import record
from expertly.lab.tune.deadline import Deadline
from expertly.model.generation import max_positions
from expertly.sim.schedule import Schedule, Selection, make_schedule
from expertly.trace.reader import Trace

SPLIT = (1, 1)
"""Requests that systems learn from, and those that they are tried on."""

LEAST_REQUESTS = 2
LEAST_NEW_TOKENS = 8

TEMPERATURE = 0.8
"""Greedy answers of small models go round in circles, and route alike all the time."""


@dataclass(frozen=True, slots=True)
class TunedWorkload:
    """What was recorded, and what of it is learned from and tried."""

    trace: Trace
    schedule: Schedule
    requests: tuple[RecordedRequest, ...]  # of `schedule.test`
    num_requests: int
    num_left_out: int  # prompts, for want of time or because the model cannot take them
    absent: dict[str, str]  # fields that could not be recorded, with reasons
    is_templated: bool = False  # prompts were put through the model's chat template


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
    """Answer the prompts in turn, as far as time goes, two of them in any case; sampled, with the seed.

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
        has_template(tokenizer) and not is_raw,
    )


def _may_go_on(deadline: Deadline, num_tokens: int) -> bool:
    return num_tokens <= LEAST_NEW_TOKENS or not deadline.is_over
