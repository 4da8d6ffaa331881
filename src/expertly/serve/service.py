"""What the server does, apart from HTTP: checked requests in, requests that run out."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from expertly.serve.answers import ChatAnswer, CompletionAnswer
from expertly.serve.errors import ApiError, invalid
from expertly.serve.grammar import Grammars
from expertly.serve.prompts import Prompts
from expertly.serve.request import ServedRequest
from expertly.serve.sampling import Sampling
from expertly.serve.scheduler import RequestScheduler
from expertly.serve.schema import MAX_CHOICES, ChatRequest, CompletionRequest, Generation, unknown_fields
from expertly.serve.settings import ServerSettings
from expertly.serve.tools import ToolReader

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's, for /v1/completions. A chat answer may fill what is left of the context."""

MAX_IGNORED_NAMED = 100
"""Fields without effect that the log names."""

log = logging.getLogger("expertly.serve")


@dataclass(frozen=True, slots=True)
class About:
    """What is said of the model. `batching`: "continuous", or "one at a time" for the reason in `why`."""

    name: str
    created: int
    context: int
    family: str
    system: str
    batching: str
    why: str | None
    chat_template: str

    def as_dict(self) -> dict[str, Any]:
        """OpenAI's object, and what it has no field for under `expertly`."""
        told = {
            "context": self.context,
            "family": self.family,
            "system": self.system,
            "batching": self.batching,
            "batching_reason": self.why,
            "chat_template": self.chat_template,
        }
        return {"id": self.name, "object": "model", "created": self.created, "owned_by": "expertly", "expertly": told}


class Service:
    """One model and who may use it. Lives in the server's event loop."""

    def __init__(
        self, about: About, settings: ServerSettings, prompts: Prompts, scheduler: RequestScheduler, ends: Sequence[int]
    ) -> None:
        self.about = about
        self.settings = settings
        self.prompts = prompts
        self.scheduler = scheduler
        self._ends = tuple(ends)
        self._grammars = Grammars(prompts.tokenizer, prompts.vocabulary, self._ends)
        self._ignored: set[str] = set()

    async def chat(self, asked: ChatRequest) -> tuple[ServedRequest, ChatAnswer]:
        """Raises ApiError."""
        self._check(asked)
        prompt = await self.prompts.of_messages(asked.messages, asked.offered)
        limit = asked.limit
        if limit is None:
            limit = self._rest_of_context(len(prompt), "messages")
        num_top = (asked.top_logprobs or 0) if asked.logprobs else None
        sampling = asked.sampling(num_top)
        if asked.grammar is not None:
            grammar = await asyncio.to_thread(self._grammars.of_schema, asked.grammar, "response_format")
            sampling = replace(sampling, grammar=grammar)
        request = self._request(asked, [prompt], limit, sampling, "messages")
        readers = {}
        if asked.offered:
            readers = {text.index: ToolReader(self.prompts, asked.offered, prompt) for text in request.texts}
        answer = ChatAnswer(self.about.name, self.prompts, request, num_top is not None, readers, asked.includes_usage)
        return request, answer

    async def complete(self, asked: CompletionRequest) -> tuple[ServedRequest, CompletionAnswer]:
        """Raises ApiError."""
        self._check(asked)
        if len(asked.prompts) * (asked.n or 1) > MAX_CHOICES:
            raise invalid(f"n: {len(asked.prompts)} prompts, {asked.n} texts each; accepted: {MAX_CHOICES} in all", "n")
        prompts: list[list[int]] = []
        for prompt in asked.prompts:
            if isinstance(prompt, str):
                prompts.append(await self.prompts.of_text(prompt))
            else:
                self.prompts.check_tokens(prompt, "prompt")
                prompts.append(prompt)
        limit = DEFAULT_COMPLETION_TOKENS if asked.max_tokens is None else asked.max_tokens
        request = self._request(asked, prompts, limit, asked.sampling(asked.logprobs), "prompt")
        echo = {text.index: self.prompts.text(text.prompt) for text in request.texts} if asked.echo else {}
        answer = CompletionAnswer(
            self.about.name, self.prompts, request, asked.logprobs is not None, echo, asked.includes_usage
        )
        return request, answer

    def start(self, request: ServedRequest) -> None:
        """Let it run, or wait for its turn. Raises ApiError."""
        self.scheduler.submit(request)
        log.info(
            "request %d: %d prompt tokens, %d texts of at most %d tokens",
            request.number,
            request.num_prompt_tokens,
            len(request.texts),
            request.texts[0].max_tokens,
        )
        if self.settings.log_prompts:
            for text in request.texts:
                log.info("request %d: prompt %r", request.number, self.prompts.text(text.prompt, special=True))

    def _check(self, asked: Generation) -> None:
        """Its model is here; fields that nobody reads are named in the log, each once."""
        if asked.model != self.about.name:
            raise ApiError(
                404,
                f"the model {asked.model!r} is not here; accepted: {self.about.name!r}",
                param="model",
                code="model_not_found",
            )
        for name in unknown_fields(asked):
            if name not in self._ignored and len(self._ignored) < MAX_IGNORED_NAMED:
                self._ignored.add(name)
                log.info("field %r: has no effect here", name[:100])

    def _rest_of_context(self, prompt: int, param: str) -> int:
        if prompt >= self.scheduler.room.context:
            self.scheduler.check_size(prompt, 1, 1, param)
        return self.scheduler.room.context - prompt

    def _request(
        self, asked: Generation, prompts: Sequence[Sequence[int]], limit: int, sampling: Sampling, param: str
    ) -> ServedRequest:
        for token in sampling.bias:
            if token >= self.prompts.vocabulary:
                raise invalid(f"logit_bias: token {token}; accepted: 0 to {self.prompts.vocabulary - 1}", "logit_bias")
        request = ServedRequest(self.prompts.text, time.perf_counter)
        for prompt in prompts:
            for number in range(asked.n or 1):
                request.add(prompt, limit, self._ends, seeded(sampling, number), asked.stops)
        longest = max(len(prompt) for prompt in prompts)
        self.scheduler.check_size(longest, limit, len(request.texts), param)
        return request


def seeded(sampling: Sampling, number: int) -> Sampling:
    """Of the texts with one seed each has its own, the first that of the request."""
    if sampling.seed is None or number == 0:
        return sampling
    return replace(sampling, seed=(sampling.seed + number * 0x9E3779B97F4A7C15) % 2**64)
