"""Which token comes next: each request by its own settings, whoever shares its forward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from llguidance import LLMatcher

from expertly.core.errors import NAN_REASONS, NanError

_COLDEST = 1e-4  # below this temperature only the likeliest token has a probability that a float distinguishes from 0

_FIRST_LOOK = 256
"""So many of the likeliest tokens nearly always reach `top_p`. Finding them costs less than sorting a vocabulary."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """A request's settings. `temperature` 0 is greedy; `top_k` 0 means all tokens; without a `seed` one is drawn.
    `logprobs`: how many alternatives each token is reported with, None for no report. `min_p`: tokens below this share
    of the likeliest one's probability are left out. `grammar`: what the text must follow, at its beginning. `script`:
    tokens that it begins with, whatever the model prefers. `ends`: tokens that may end it, not before `min_tokens`.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    grammar: LLMatcher | None = None
    script: Sequence[int] = ()
    ends: Sequence[int] = ()
    min_tokens: int = 0
    allowed_token_ids: Sequence[int] | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature < _COLDEST or self.top_k == 1

    @property
    def changes_logits(self) -> bool:
        numbers = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty, self.min_tokens)
        return bool(self.bias or self.allowed_token_ids or self.grammar is not None) or numbers != (0, 0, 1, 0)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token and, where asked for, its log probability and those of the likeliest, before any setting changes them."""

    token: int
    logprob: float | None = None
    top: Sequence[tuple[int, float]] = ()
    problem: str | None = None  # why its text cannot go on; the token is none then


@dataclass(slots=True)
class _State:
    sampling: Sampling
    random: np.random.Generator
    prompt: Sequence[int]
    grammar: LLMatcher | None
    bias: tuple[torch.Tensor, torch.Tensor] | None  # tokens, and what is added to their logits
    counts: dict[int, int] = field(default_factory=dict)  # of the tokens that it has written
    num_scripted: int = 0  # so far


class Sampler:
    """The tokens of all requests. Calls `tell(choices)` once a forward pass, in the model's thread; requests come and
    go in another. Each has its own random numbers, PCG64 from its seed, one for each token: with the same logits a seed
    gives the same text, whatever else is in the batch.
    """

    def __init__(self, tell: Callable[[Sequence[tuple[str, SampledToken]]], None]) -> None:
        self._tell = tell
        self._states: dict[str, _State] = {}

    def add(self, name: str, sampling: Sampling, prompt: Sequence[int] = ()) -> None:
        """Call it before the request is submitted. A known name keeps its state."""
        if name not in self._states:
            grammar = None if sampling.grammar is None else sampling.grammar.deep_copy()
            bias = torch.tensor(list(sampling.bias)), torch.tensor(list(sampling.bias.values()))
            random = np.random.default_rng(sampling.seed)
            self._states[name] = _State(sampling, random, prompt, grammar, bias if sampling.bias else None)

    def remove(self, name: str) -> None:
        self._states.pop(name, None)

    def choose(self, names: Sequence[str], logits: torch.Tensor) -> list[int | None]:
        """See model/batching.py. Raises NanError where logits are NaN."""
        states = [self._states.get(name) for name in names]
        highest, places = logits.max(dim=-1)
        if bool(highest.isnan().any()):
            raise NanError(f"the model's output layer gave NaN: {NAN_REASONS}")
        greedy = places.tolist()
        tokens: list[int | None] = [None] * len(names)
        choices = []
        for row, (name, state) in enumerate(zip(names, states, strict=True)):
            if state is None:  # cancelled while the pass ran
                continue
            sampling = state.sampling
            token = greedy[row]
            if state.num_scripted < len(sampling.script):
                token = tokens[row] = sampling.script[state.num_scripted]
                state.num_scripted += 1
            else:
                if not sampling.is_greedy or sampling.changes_logits:
                    token = tokens[row] = _draw(_adjusted(logits[row], state), state)
                state.counts[token] = state.counts.get(token, 0) + 1
                grammar = state.grammar
                # where nothing may come, it takes an end, and is in error
                if grammar is not None and (not grammar.consume_token(token) or grammar.is_error()):
                    problem = grammar.get_error() or f"it has no place for token {token}"
                    choices.append((name, SampledToken(token, problem=f"the grammar of its schema broke: {problem}")))
                    continue
            choices.append((name, _choice(logits[row], token, sampling.logprobs)))
        self._tell(choices)
        return tokens


def _adjusted(logits: torch.Tensor, state: _State) -> torch.Tensor:
    """The logits [V] after biases, repetition penalties and the grammar."""
    sampling = state.sampling
    if not sampling.changes_logits:
        return logits
    logits = logits.clone()
    if sampling.repetition_penalty != 1:
        seen = torch.tensor(sorted({*state.prompt, *state.counts}), device=logits.device)
        penalty = sampling.repetition_penalty
        logits[seen] = torch.where(logits[seen] < 0, logits[seen] * penalty, logits[seen] / penalty)
    if state.counts and (sampling.presence_penalty or sampling.frequency_penalty):
        ids = torch.tensor(list(state.counts), device=logits.device)
        counts = torch.tensor(list(state.counts.values()), device=logits.device, dtype=logits.dtype)
        logits[ids] -= sampling.presence_penalty + sampling.frequency_penalty * counts
    if state.bias is not None:
        ids, values = state.bias
        logits[ids.to(logits.device)] += values.to(logits)
    if sum(state.counts.values()) < sampling.min_tokens:
        logits[list(sampling.ends)] -= 1e4  # they may come where nothing else may
    if sampling.allowed_token_ids:
        ids = torch.tensor(sampling.allowed_token_ids, device=logits.device)
        logits = torch.full_like(logits, -torch.inf).index_copy(0, ids, logits[ids])
    if state.grammar is not None:
        bias = bytearray(state.grammar.compute_logit_bias())  # 0: may not come next
        allowed = (torch.frombuffer(bias, dtype=torch.uint8) > 0).to(logits.device)
        logits[: len(allowed)].masked_fill_(~allowed, -torch.inf)
        logits[len(allowed) :] = -torch.inf
    return logits


def _draw(logits: torch.Tensor, state: _State) -> int:
    """Choose one token by the request's next random number, among those that `top_k`, `min_p` and `top_p` leave."""
    sampling = state.sampling
    if sampling.is_greedy:
        return int(logits.argmax())
    probabilities = torch.softmax(logits.double() / sampling.temperature, dim=-1)
    if sampling.min_p:
        probabilities = probabilities.where(probabilities >= sampling.min_p * probabilities.max(), 0.0)
        probabilities /= probabilities.sum()
    order = None
    if sampling.top_k or sampling.top_p < 1:
        width = min(sampling.top_k or _FIRST_LOOK, len(probabilities))
        likeliest, order = probabilities.topk(width)
        if not sampling.top_k and float(likeliest.sum()) < sampling.top_p:
            likeliest, order = probabilities.sort(descending=True)
        probabilities = likeliest
    sums = probabilities.cumsum(dim=-1)
    if sampling.top_p < 1:
        enough = sampling.top_p * (float(sums[-1]) if sampling.top_k else 1.0)
        sums = sums[: int((sums < enough).sum()) + 1]
    drawn = state.random.random() * float(sums[-1])
    place = min(int(torch.searchsorted(sums, drawn, right=True)), len(sums) - 1)
    return place if order is None else int(order[place])


def _choice(logits: torch.Tensor, token: int, num_top: int | None) -> SampledToken:
    if num_top is None:
        return SampledToken(token)
    logprobs = torch.log_softmax(logits, dim=-1)
    values, ids = logprobs.topk(min(num_top, len(logprobs)))
    return SampledToken(token, float(logprobs[token]), list(zip(ids.tolist(), values.tolist(), strict=True)))
