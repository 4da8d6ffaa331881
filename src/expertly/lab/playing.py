"""Runs requests on a loaded model token by token: lets it answer, or feeds it recorded tokens. Also lets its system
learn from a recording.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from expertly.api import handle
from expertly.engine.learned import eviction_policies
from expertly.model.hooks import CACHE
from expertly.policies.eviction.reuse import ReuseModel, ReuseTraining
from expertly.sim.schedule import Schedule, num_prompt_rows
from expertly.sim.training import histories, teach
from expertly.trace.reader import Trace

Choose = Callable[[torch.Tensor], int]
"""Chooses a token by its logits [V]."""

LEAST_STEPS = 8
"""Steps that an answer keeps when it is cut short."""


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """A request's recorded tokens, which every system is fed alike; the first `num_prompt` are the prompt."""

    tokens: tuple[int, ...]
    num_prompt: int
    number: int = 0  # in its trace

    def cut(self, share: float) -> RecordedRequest:
        """The request with that share of its steps, and at least LEAST_STEPS of them."""
        num_steps = max(LEAST_STEPS, int(share * (len(self.tokens) - self.num_prompt)))
        return replace(self, tokens=self.tokens[: self.num_prompt + num_steps])


def recorded_requests(trace: Trace, schedule: Schedule) -> list[RecordedRequest]:
    """The requests that systems are tried on. The schedule is of whole requests."""
    found = []
    for span in schedule.test:
        assert span.request is not None
        tokens = trace.rows("token", span.first_row, span.first_row + span.num_rows).tolist()
        found.append(RecordedRequest(tuple(tokens), num_prompt_rows(trace, span), span.request))
    return found


@dataclass(frozen=True, slots=True)
class Played:
    """How long a request took."""

    ttft_s: float
    steps_s: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """From its begin to its last token."""
        return self.ttft_s + sum(self.steps_s)

    @property
    def tpot_s(self) -> float | None:
        """The mean of its steps; None where the answer was a single token."""
        return sum(self.steps_s) / len(self.steps_s) if self.steps_s else None


def answer(
    model: Any,
    prompt: Sequence[int],
    max_new_tokens: int,
    choose: Choose,
    may_go_on: Callable[[int], bool] = lambda num: True,
) -> None:
    """Let the model answer a prompt until it ends, has written `max_new_tokens`, or `may_go_on(tokens so far)` is
    false. The last token is not fed.
    """
    found = model.generation_config.eos_token_id
    ends = found if isinstance(found, list) else [found]
    ids, cache, num = torch.tensor([list(prompt)]), None, 0
    with torch.no_grad():
        while True:
            logits, cache = forward(model, ids, cache)
            token = choose(logits[0])
            num += 1
            if token in ends or num >= max_new_tokens or not may_go_on(num):
                return
            ids = torch.tensor([[token]])


def feed(model: Any, tokens: Sequence[int], num_prompt: int) -> Played:
    """Run a prompt of `num_prompt` tokens in one pass, and each further token in its own."""
    times = [time.perf_counter()]
    cache = None
    with torch.no_grad():
        for ids in (tokens[:num_prompt], *([token] for token in tokens[num_prompt:])):
            logits, cache = forward(model, torch.tensor([list(ids)]), cache)
            logits[0].argmax().item()  # as who generates would look at it: an accelerator is done by then
            times.append(time.perf_counter())
    spent = [end - begin for begin, end in pairwise(times)]
    return Played(spent[0], tuple(spent[1:]))


def learn(model: Any, trace: Trace, schedule: Schedule) -> None:
    """Let predictor and eviction learn from the training part, if they learn at all."""
    engine = handle(model).engine
    for policy in eviction_policies(engine.executor):
        if isinstance(policy.learned, ReuseModel):
            teach(ReuseTraining(policy.learned), trace, schedule.training)
    if engine.prefetching is not None:
        predictor = engine.prefetching.predictor
        for history in histories(trace, schedule.training, predictor.wants):
            predictor.learn(history)


def forward(model: Any, ids: torch.Tensor, cache: Any) -> tuple[torch.Tensor, Any]:
    """The logits [requests, V] after the last of the `ids` [requests, T], and the KV cache with these tokens."""
    last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    out = model(ids.to(model.device), **{CACHE: cache}, use_cache=True, **last)
    return out.logits[:, -1], getattr(out, CACHE)


def chooser(temperature: float, seed: int) -> Choose:
    """Samples at a temperature with its own generator; greedy at temperature 0."""
    generator = torch.Generator().manual_seed(seed)

    def choose(logits: torch.Tensor) -> int:
        if temperature == 0:
            return int(logits.argmax())
        shares = torch.softmax(logits.float().cpu() / temperature, -1)
        return int(torch.multinomial(shares, 1, generator=generator))

    return choose
