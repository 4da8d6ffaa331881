"""OpenAI's objects: whole answers and the chunks of a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from expertly.model.answers import AnswerPart, AnswerReader
from expertly.serve.prompts import Prompts
from expertly.serve.request import Delta, ServedRequest
from expertly.serve.sampling import SampledToken

Json = dict[str, Any]


def usage(request: ServedRequest) -> Json:
    prompt, written = request.num_prompt_tokens, request.num_tokens
    return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}


def parts_of(readers: Mapping[int, AnswerReader], delta: Delta) -> list[AnswerPart]:
    """What `delta` adds to its text. Each delta is read once, in the order they came."""
    reader = readers.get(delta.index)
    if reader is None:
        return [AnswerPart("content", delta.text)] if delta.text else []
    parts = reader.add(delta.text) if delta.text else []
    return parts + (reader.end() if delta.reason is not None else [])


def _reason(reason: str | None, num_calls: int) -> str | None:
    return "tool_calls" if reason == "stop" and num_calls else reason


class _Answer:
    """What the chunks of one answer, or all of it, have in common."""

    prefix = ""

    def __init__(
        self, model: str, prompts: Prompts, request: ServedRequest, has_logprobs: bool, includes_usage: bool
    ) -> None:
        self.prompts = prompts
        self.request = request
        self.has_logprobs = has_logprobs
        self._null = {"usage": None} if includes_usage else {}
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def _object(self, kind: str, choices: Sequence[Json], **more: Any) -> Json:
        return {**self._head, "object": kind, "choices": list(choices), **more}


class ChatAnswer(_Answer):
    """`readers`: of the texts in which there may be more than content, by index."""

    prefix = "chatcmpl"

    def __init__(
        self,
        model: str,
        prompts: Prompts,
        request: ServedRequest,
        has_logprobs: bool,
        readers: Mapping[int, AnswerReader],
        includes_usage: bool = False,
    ) -> None:
        super().__init__(model, prompts, request, has_logprobs, includes_usage)
        self._readers = readers
        self._num_calls: dict[int, int] = {}

    def chunks(self, delta: Delta) -> list[Json]:
        """What a stream tells of `delta`."""
        chunks = []
        if delta.index not in self._num_calls:
            self._num_calls[delta.index] = 0
            chunks.append(self._chunk(delta.index, {"role": "assistant", "content": ""}))
        parts = parts_of(self._readers, delta)
        if delta.choices and not any(part.kind == "content" for part in parts):
            parts.append(AnswerPart("content"))  # tokens without text have log probabilities as well
        untold = delta.choices
        for part in parts:
            logprobs = self._logprobs(untold) if self.has_logprobs and part.kind == "content" else None
            untold = () if logprobs is not None else untold
            chunks.append(self._chunk(delta.index, self._told_part(delta.index, part), logprobs))
        if delta.reason is not None:
            reason = _reason(delta.reason, self._num_calls[delta.index])
            chunks.append(self._chunk(delta.index, {}, reason=reason))
        return chunks

    def _told_part(self, index: int, part: AnswerPart) -> Json:
        if part.call is not None:
            number = self._num_calls[index]
            self._num_calls[index] += 1
            return {"tool_calls": [{"index": number, **part.call.as_dict()}]}
        return {"reasoning_content" if part.kind == "reasoning" else "content": part.text}

    def last_chunks(self) -> list[Json]:
        return [self._object("chat.completion.chunk", [], usage=usage(self.request))] if self._null else []

    def whole(self, deltas: Sequence[Delta]) -> Json:
        choices = []
        for index in range(len(self.request.texts)):
            own = [delta for delta in deltas if delta.index == index]
            parts = [part for delta in own for part in parts_of(self._readers, delta)]
            content = "".join(part.text for part in parts if part.kind == "content")
            thought = "".join(part.text for part in parts if part.kind == "reasoning")
            calls = [part.call.as_dict() for part in parts if part.call is not None]
            message: Json = {"role": "assistant", "content": None if calls and not content else content}
            message["refusal"] = None
            if thought:
                message["reasoning_content"] = thought
            if calls:
                message["tool_calls"] = calls
            choice_tokens = [choice for delta in own for choice in delta.choices]
            choices.append(
                {
                    "index": index,
                    "message": message,
                    "logprobs": self._logprobs(choice_tokens) if self.has_logprobs else None,
                    "finish_reason": _reason(own[-1].reason, len(calls)),
                }
            )
        return self._object("chat.completion", choices, usage=usage(self.request))

    def _chunk(self, index: int, delta: Json, logprobs: Json | None = None, reason: str | None = None) -> Json:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return self._object("chat.completion.chunk", [choice], **self._null)

    def _logprobs(self, choices: Sequence[SampledToken]) -> Json:
        return {"content": [self._told(choice) for choice in choices], "refusal": None}

    def _told(self, choice: SampledToken) -> Json:
        top = [self._token(token, logprob) for token, logprob in choice.top]
        return {**self._token(choice.token, choice.logprob), "top_logprobs": top}

    def _token(self, token: int, logprob: float | None) -> Json:
        text, piece = self.prompts.piece(token)
        return {"token": text, "logprob": finite(logprob), "bytes": list(piece)}


class CompletionAnswer(_Answer):
    """`echo`: the prompts' texts, by index, that go before what is written."""

    prefix = "cmpl"

    def __init__(
        self,
        model: str,
        prompts: Prompts,
        request: ServedRequest,
        has_logprobs: bool,
        echo: Mapping[int, str],
        includes_usage: bool = False,
    ) -> None:
        super().__init__(model, prompts, request, has_logprobs, includes_usage)
        self._echo = echo
        self._offsets = [0 if has_logprobs else len(echo.get(index, "")) for index in range(len(request.texts))]
        self._started: set[int] = set()

    def chunks(self, delta: Delta) -> list[Json]:
        """What a stream tells of `delta`."""
        text, first = delta.text, []
        if delta.index not in self._started:
            self._started.add(delta.index)
            text = self._echo.get(delta.index, "") + text
            first = self._first(delta.index)
        if not text and delta.reason is None:
            return []
        logprobs = self._logprobs(delta.index, [*first, *delta.choices]) if self.has_logprobs else None
        return [
            self._object("text_completion", [self._choice(delta.index, text, logprobs, delta.reason)], **self._null)
        ]

    def last_chunks(self) -> list[Json]:
        return [self._object("text_completion", [], usage=usage(self.request))] if self._null else []

    def whole(self, deltas: Sequence[Delta]) -> Json:
        choices = []
        for index in range(len(self.request.texts)):
            own = [delta for delta in deltas if delta.index == index]
            text = self._echo.get(index, "") + "".join(delta.text for delta in own)
            tokens = [choice for delta in own for choice in delta.choices]
            logprobs = self._logprobs(index, [*self._first(index), *tokens]) if self.has_logprobs else None
            choices.append(self._choice(index, text, logprobs, own[-1].reason))
        return self._object("text_completion", choices, usage=usage(self.request))

    def _choice(self, index: int, text: str, logprobs: Json | None, reason: str | None) -> Json:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _first(self, index: int) -> list[SampledToken]:
        """Of an echoed prompt, which nothing comes before."""
        text = self.request.texts[index]
        return [SampledToken(text.prompt[0])] if index in self._echo and self.has_logprobs else []

    def _logprobs(self, index: int, choices: Sequence[SampledToken]) -> Json:
        """Offsets count what each token is alone: near enough where characters span tokens."""
        pieces = [self.prompts.text([choice.token], special=True) for choice in choices]
        offsets = []
        for piece in pieces:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(piece)
        tops = [
            None
            if choice.logprob is None
            else {self.prompts.text([token], special=True): finite(value) for token, value in choice.top}
            for choice in choices
        ]
        return {
            "tokens": pieces,
            "token_logprobs": [None if one.logprob is None else finite(one.logprob) for one in choices],
            "top_logprobs": tops,
            "text_offset": offsets,
        }


def finite(logprob: float | None) -> float:
    """JSON has no infinity: OpenAI says -9999.0 for what is as good as impossible."""
    return -9999.0 if logprob is None or logprob < -9999.0 else logprob
