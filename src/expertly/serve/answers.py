"""OpenAI's objects: whole answers and the chunks of a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from expertly.serve.prompts import Prompts
from expertly.serve.request import Delta, ServedRequest
from expertly.serve.sampling import SampledToken
from expertly.serve.tools import ToolReader

Json = dict[str, Any]


def usage(request: ServedRequest) -> Json:
    prompt, written = request.num_prompt_tokens, request.num_tokens
    return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}


class _Answer:
    """What the chunks of one answer, or all of it, have in common."""

    prefix = ""

    def __init__(self, model: str, prompts: Prompts, request: ServedRequest, has_logprobs: bool) -> None:
        self.prompts = prompts
        self.request = request
        self.has_logprobs = has_logprobs
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def _object(self, kind: str, choices: Sequence[Json], **more: Any) -> Json:
        return {**self._head, "object": kind, "choices": list(choices), **more}


class ChatAnswer(_Answer):
    """`readers`: of the texts that may call tools, by index."""

    prefix = "chatcmpl"

    def __init__(
        self,
        model: str,
        prompts: Prompts,
        request: ServedRequest,
        has_logprobs: bool,
        readers: Mapping[int, ToolReader],
        usage_null: bool = False,
    ) -> None:
        super().__init__(model, prompts, request, has_logprobs)
        self._readers = readers
        self._null = {"usage": None} if usage_null else {}
        self._started: set[int] = set()

    def chunks(self, delta: Delta) -> list[Json]:
        """What a stream tells of `delta`."""
        text, calls = self._parted(delta)
        chunks = []
        if delta.index not in self._started:
            self._started.add(delta.index)
            chunks.append(self._chunk(delta.index, {"role": "assistant", "content": ""}))
        if text or delta.choices:
            logprobs = self._logprobs(delta.choices) if self.has_logprobs else None
            chunks.append(self._chunk(delta.index, {"content": text}, logprobs))
        for number, call in enumerate(calls):
            chunks.append(self._chunk(delta.index, {"tool_calls": [{"index": number, **call}]}))
        if delta.reason is not None:
            chunks.append(self._chunk(delta.index, {}, reason="tool_calls" if calls else delta.reason))
        return chunks

    def usage_chunk(self) -> Json:
        return self._object("chat.completion.chunk", [], usage=usage(self.request))

    def whole(self, deltas: Sequence[Delta]) -> Json:
        choices = []
        for index in range(len(self.request.texts)):
            content, reason = "", None
            calls: list[Json] = []
            choice_tokens: list[SampledToken] = []
            for delta in deltas:
                if delta.index == index:
                    text, more = self._parted(delta)
                    content, calls, reason = content + text, [*calls, *more], delta.reason
                    choice_tokens += delta.choices
            message: Json = {"role": "assistant", "content": None if calls and not content else content}
            message["refusal"] = None
            if calls:
                message["tool_calls"] = calls
            choices.append(
                {
                    "index": index,
                    "message": message,
                    "logprobs": self._logprobs(choice_tokens) if self.has_logprobs else None,
                    "finish_reason": "tool_calls" if calls else reason,
                }
            )
        return self._object("chat.completion", choices, usage=usage(self.request))

    def _parted(self, delta: Delta) -> tuple[str, list[Json]]:
        reader = self._readers.get(delta.index)
        if reader is None:
            return delta.text, []
        text = reader.add(delta.text)
        if delta.reason is None:
            return text, []
        rest, calls = reader.end(self.request.texts[delta.index].tokens)
        return text + rest, [call.as_dict() for call in calls]

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
        usage_null: bool = False,
    ) -> None:
        super().__init__(model, prompts, request, has_logprobs)
        self._echo = echo
        self._null = {"usage": None} if usage_null else {}
        self._offsets = [len(echo.get(index, "")) for index in range(len(request.texts))]
        self._started: set[int] = set()

    def chunks(self, delta: Delta) -> list[Json]:
        """What a stream tells of `delta`."""
        text = delta.text
        if delta.index not in self._started:
            self._started.add(delta.index)
            text = self._echo.get(delta.index, "") + text
        if not text and delta.reason is None:
            return []
        logprobs = self._logprobs(delta.index, delta.choices) if self.has_logprobs else None
        return [
            self._object("text_completion", [self._choice(delta.index, text, logprobs, delta.reason)], **self._null)
        ]

    def usage_chunk(self) -> Json:
        return self._object("text_completion", [], usage=usage(self.request))

    def whole(self, deltas: Sequence[Delta]) -> Json:
        choices = []
        for index in range(len(self.request.texts)):
            own = [delta for delta in deltas if delta.index == index]
            text = self._echo.get(index, "") + "".join(delta.text for delta in own)
            tokens = [choice for delta in own for choice in delta.choices]
            logprobs = self._logprobs(index, tokens) if self.has_logprobs else None
            choices.append(self._choice(index, text, logprobs, own[-1].reason))
        return self._object("text_completion", choices, usage=usage(self.request))

    def _choice(self, index: int, text: str, logprobs: Json | None, reason: str | None) -> Json:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, index: int, choices: Sequence[SampledToken]) -> Json:
        """Offsets count what each token is alone: near enough where characters span tokens."""
        pieces = [self.prompts.text([choice.token], special=True) for choice in choices]
        offsets = []
        for piece in pieces:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(piece)
        tops = [
            {self.prompts.text([token], special=True): finite(value) for token, value in choice.top}
            for choice in choices
        ]
        return {
            "tokens": pieces,
            "token_logprobs": [finite(choice.logprob) for choice in choices],
            "top_logprobs": tops,
            "text_offset": offsets,
        }


def finite(logprob: float | None) -> float:
    """JSON has no infinity: OpenAI says -9999.0 for what is as good as impossible."""
    return -9999.0 if logprob is None or logprob < -9999.0 else logprob
