"""OpenAI's objects: whole answers and the chunks of a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from expertly.model.answers import AnswerPart
from expertly.serve.errors import ApiError
from expertly.serve.prompts import Prompts
from expertly.serve.request import Delta, Reason, ServedRequest
from expertly.serve.sampling import SampledToken
from expertly.serve.schema import ChatRequest, CompletionRequest

Json = dict[str, Any]


def usage(request: ServedRequest) -> Json:
    prompt, written = request.num_prompt_tokens, request.num_tokens
    return {
        "prompt_tokens": prompt,
        "prompt_tokens_details": {"cached_tokens": request.num_cached_tokens},
        "completion_tokens": written,
        "total_tokens": prompt + written,
    }


def called(part: AnswerPart) -> Json:
    """A call that begins with `part`, without arguments."""
    return {"id": part.id, "type": "function", "function": {"name": part.text, "arguments": ""}}


class _Answer:
    """What whole answers and streams have in common."""

    prefix = kind = kind_of_chunk = ""
    done = b"data: [DONE]\n\n"  # ends a stream
    _choice: Callable[[int, Sequence[Delta]], Json]
    failure = staticmethod(ApiError.body)  # makes the last event of a stream that failed

    def __init__(self, asked: ChatRequest | CompletionRequest, prompts: Prompts, request: ServedRequest) -> None:
        self.prompts = prompts
        self.request = request
        self.has_logprobs = asked.logprobs is not None and asked.logprobs is not False
        has_usage = asked.stream_options is not None and asked.stream_options.include_usage
        self._null = {"usage": None} if has_usage else {}
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": asked.model}

    async def whole(self) -> Json:
        deltas: list[list[Delta]] = [[] for _ in self.request.texts]
        async for delta in self.request:
            deltas[delta.index].append(delta)
        choices = [self._choice(index, of_text) for index, of_text in enumerate(deltas)]
        return {**self._head, "object": self.kind, "choices": choices, "usage": usage(self.request)}

    def last_chunks(self) -> list[Json]:
        """The chunk with the usage, where the client asked for it."""
        return [self._chunk() | {"usage": usage(self.request)}] if self._null else []

    def _chunk(self, *choices: Json) -> Json:
        return {**self._head, "object": self.kind_of_chunk, "choices": list(choices), **self._null}


class ChatAnswer(_Answer):
    prefix, kind, kind_of_chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, asked: ChatRequest, prompts: Prompts, request: ServedRequest) -> None:
        super().__init__(asked, prompts, request)
        self._num_calls: dict[int, int] = {}

    def chunks(self, delta: Delta) -> list[Json]:
        chunks = []
        if delta.index not in self._num_calls:
            self._num_calls[delta.index] = 0
            chunks.append(self._delta(delta.index, {"role": "assistant", "content": ""}))
        parts = self.request.parts(delta)
        if delta.choices and not any(part.kind == "content" for part in parts):
            parts.append(AnswerPart("content"))  # tokens without text have log probabilities as well
        untold = delta.choices
        for part in parts:
            logprobs = None
            if part.kind == "content":
                logprobs, untold = self._logprobs(untold), ()
            chunks.append(self._delta(delta.index, self._of_part(delta.index, part), logprobs))
        if delta.reason is not None:
            reason = _reason(delta, self._num_calls[delta.index])
            chunks.append(self._delta(delta.index, {}, reason=reason))
        return chunks

    def _of_part(self, index: int, part: AnswerPart) -> Json:
        if part.kind in ("content", "reasoning"):
            return {"reasoning_content" if part.kind == "reasoning" else "content": part.text}
        self._num_calls[index] += part.kind == "call"
        written = called(part) if part.kind == "call" else {"function": {"arguments": part.text}}
        return {"tool_calls": [{"index": self._num_calls[index] - 1, **written}]}

    def _choice(self, index: int, deltas: Sequence[Delta]) -> Json:
        parts = self.request.parts(replace(deltas[-1], text="".join(delta.text for delta in deltas)))
        content, thought = (
            "".join(part.text for part in parts if part.kind == kind) for kind in ("content", "reasoning")
        )
        calls: list[Json] = []
        for part in parts:
            if part.kind == "call":
                calls.append(called(part))
            elif part.kind == "arguments":
                calls[-1]["function"]["arguments"] += part.text
        message: Json = {"role": "assistant", "content": None if calls and not content else content, "refusal": None}
        message |= {"reasoning_content": thought} if thought else {}
        message |= {"tool_calls": calls} if calls else {}
        logprobs = self._logprobs([token for delta in deltas for token in delta.choices])
        reason = _reason(deltas[-1], len(calls))
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def _delta(self, index: int, delta: Json, logprobs: Json | None = None, reason: str | None = None) -> Json:
        return self._chunk({"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason})

    def _logprobs(self, choices: Sequence[SampledToken]) -> Json | None:
        if not self.has_logprobs:
            return None
        content = []
        for choice in choices:
            alternatives = [self._token(token, logprob) for token, logprob in choice.top]
            content.append(self._token(choice.token, choice.logprob) | {"top_logprobs": alternatives})
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float | None) -> Json:
        text, piece = self.prompts.piece(token)
        return {"token": text, "logprob": _finite(logprob), "bytes": list(piece)}


def _reason(delta: Delta, num_calls: int) -> str | None:
    return "tool_calls" if delta.reason == "stop" and num_calls else delta.reason


class CompletionAnswer(_Answer):
    prefix, kind, kind_of_chunk = "cmpl", "text_completion", "text_completion"

    def __init__(self, asked: CompletionRequest, prompts: Prompts, request: ServedRequest) -> None:
        super().__init__(asked, prompts, request)
        # the prompts' texts, by index, that are still to be told before what is written
        self._echo = {text.index: prompts.text(text.prompt) for text in request.texts} if asked.echo else {}
        self._offsets = [0] * len(request.texts)

    def chunks(self, delta: Delta) -> list[Json]:
        if not (delta.text or delta.reason is not None or delta.index in self._echo):
            return []
        return [self._chunk(self._choice(delta.index, [delta]))]

    def _choice(self, index: int, deltas: Sequence[Delta]) -> Json:
        text = "".join(delta.text for delta in deltas)
        tokens = [token for delta in deltas for token in delta.choices]
        if index in self._echo:
            text = self._echo.pop(index) + text
            tokens.insert(0, SampledToken(self.request.texts[index].prompt[0]))  # which nothing comes before
        logprobs = self._logprobs(index, tokens) if self.has_logprobs else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": deltas[-1].reason}

    def _logprobs(self, index: int, choices: Sequence[SampledToken]) -> Json:
        """Offsets count each token's own text, which is near enough where a character spans tokens."""
        logprobs: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for choice in choices:
            piece, is_first = self.prompts.text([choice.token], special=True), choice.logprob is None
            alternatives = (*choice.top, (choice.token, choice.logprob))  # the chosen one as well, as OpenAI has it
            top = {self.prompts.text([token], special=True): _finite(value) for token, value in alternatives}
            logprobs["tokens"].append(piece)
            logprobs["token_logprobs"].append(None if is_first else _finite(choice.logprob))
            logprobs["top_logprobs"].append(None if is_first else top)
            logprobs["text_offset"].append(self._offsets[index])
            self._offsets[index] += len(piece)
        return logprobs


class BlockAnswer:
    """An answer as blocks: what was thought, its text, each tool call. A whole one is what its stream has told."""

    done = b""
    _begun: Callable[[AnswerPart], list[Json]]  # adds a block for a part and those that follow
    _added: Callable[[AnswerPart], Json]  # adds a part to the open block
    _ended: Callable[[], list[Json]]  # completes the last block

    def __init__(self, request: ServedRequest) -> None:
        self.request = request
        self.blocks: list[Json] = []
        self.reason: Reason | None = None  # why it ended
        self._open = ""  # the kind of the parts that come to the last block, while more may come

    def chunks(self, delta: Delta) -> list[Json]:
        events: list[Json] = []
        for part in self.request.parts(delta):
            if part.kind != self._open:
                events += self._close() + self._begun(part)
                self._open = "arguments" if part.kind == "call" else part.kind
            if part.kind != "call":
                events.append(self._added(part))
        self.reason = delta.reason
        return events if delta.reason is None else events + self._close()

    def _close(self) -> list[Json]:
        """The events that end the open block; none where none is open."""
        kind, self._open = self._open, ""
        return self._ended() if kind else []


def _finite(logprob: float | None) -> float:
    """JSON has no infinity: as OpenAI does, -9999.0 stands for a probability of 0."""
    return -9999.0 if logprob is None or logprob < -9999.0 else logprob
