"""What /v1/responses, OpenAI's newer API, answers: items, and the events of a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from expertly.model.answers import AnswerReader, Call
from expertly.serve.answers import Json, parts_of, usage
from expertly.serve.errors import ApiError
from expertly.serve.request import Delta, ServedRequest
from expertly.serve.schema import ResponsesRequest


class ResponsesAnswer:
    """One answer as items: its reasoning, its text, each tool call."""

    done = b""

    def __init__(self, asked: ResponsesRequest, request: ServedRequest, readers: Mapping[int, AnswerReader]) -> None:
        self.request = request
        echoed = {"model", "instructions", "max_output_tokens", "temperature", "top_p", "tools", "tool_choice", "text"}
        self._echo = {"parallel_tool_calls": asked.parallel_tool_calls is not False}
        self._echo |= asked.model_dump(include=echoed, by_alias=True, exclude_none=True)
        self._readers = readers
        self._id = f"resp_{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._items: list[Json] = []
        self._open: str | None = None  # "output" or "reasoning" of the last item, while text comes to it
        self._reason: str | None = None
        self._number = 0  # of the next event
        self._num_thought = 0  # tokens of what was thought, with its marks
        self._num_untold = 0  # tokens since the last that made a part

    def chunks(self, delta: Delta) -> list[Json]:
        """The events for `delta`."""
        events: list[Json] = []
        if self._number == 0:
            for name in ("created", "in_progress"):
                events.append(self._event(f"response.{name}", response=self._object("in_progress")))
        self._num_untold += 1  # a delta is one token
        parts = parts_of(self._readers, delta)
        if any(part.kind == "reasoning" for part in parts):
            self._num_thought += self._num_untold
        if parts:
            self._num_untold = 0
        for part in parts:
            if part.call is not None:
                events += self._closed() + self._called(part.call)
            else:
                events += self._said("reasoning" if part.kind == "reasoning" else "output", part.text)
        if delta.reason is not None:
            events += self._closed()
            self._reason = delta.reason
        return events

    def last_chunks(self) -> list[Json]:
        status = self._status()
        return [self._event(f"response.{status}", response=self._object(status))]

    def failure(self, error: ApiError) -> Json:
        """The last event of a stream that failed."""
        failed = self._object("failed") | {"error": {"code": "server_error", "message": error.message}}
        return self._event("response.failed", response=failed)

    def whole(self, deltas: Sequence[Delta]) -> Json:
        for delta in deltas:
            self.chunks(delta)
        return self._object(self._status())

    def _said(self, kind: str, text: str) -> list[Json]:
        """The events for more text of one kind."""
        events = []
        if self._open != kind:
            events = self._closed()
            self._open = kind
            content: Json = {"type": f"{kind}_text", "text": ""}
            if kind == "reasoning":
                item: Json = {"type": "reasoning", "id": f"rs_{uuid.uuid4().hex}", "summary": []}
            else:
                item = {"type": "message", "id": f"msg_{uuid.uuid4().hex}", "role": "assistant"}
                content |= {"annotations": [], "logprobs": []}
            item["status"] = "in_progress"
            events += [
                self._of_item("added", item | {"content": []}),
                self._of_text("response.content_part.added", part=dict(content)),
            ]
            self._items[-1]["content"] = [content]
        self._items[-1]["content"][0]["text"] += text
        return [*events, self._of_text(f"response.{kind}_text.delta", delta=text, **self._no_logprobs())]

    def _closed(self) -> list[Json]:
        """The events that end the open item; none where no item is open."""
        if self._open is None:
            return []
        content = self._items[-1]["content"][0]
        text = self._of_text(f"response.{self._open}_text.done", text=content["text"], **self._no_logprobs())
        self._open = None
        return [text, self._of_text("response.content_part.done", part=content), self._of_item("done")]

    def _called(self, call: Call) -> list[Json]:
        item = {"type": "function_call", "id": f"fc_{uuid.uuid4().hex}", "call_id": call.id, "name": call.name}
        events = [self._of_item("added", {**item, "arguments": "", "status": "in_progress"})]
        self._items[-1]["arguments"] = call.arguments
        name, place = "response.function_call_arguments", self._place()
        events.append(self._event(f"{name}.delta", **place, delta=call.arguments))
        events.append(self._event(f"{name}.done", **place, arguments=call.arguments, name=call.name))
        return [*events, self._of_item("done")]

    def _of_item(self, what: str, begun: Json | None = None) -> Json:
        """The event that adds an item, or ends the last one."""
        if begun is None:
            item = self._items[-1]
            item["status"] = "completed"
        else:
            item = dict(begun)
            self._items.append(begun)
        return self._event(f"response.output_item.{what}", output_index=len(self._items) - 1, item=item)

    def _of_text(self, kind: str, **more: Any) -> Json:
        return self._event(kind, **self._place(), content_index=0, **more)

    def _place(self) -> Json:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _no_logprobs(self) -> Json:
        return {"logprobs": []} if self._open == "output" else {}

    def _status(self) -> str:
        return "incomplete" if self._reason == "length" else "completed"

    def _event(self, kind: str, **more: Any) -> Json:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **more}

    def _object(self, status: str) -> Json:
        is_over = status not in ("in_progress", "failed")
        used = usage(self.request)
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": list(self._items) if is_over else [],
            "usage": {
                "input_tokens": used["prompt_tokens"],
                "input_tokens_details": used["prompt_tokens_details"],
                "output_tokens": used["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": self._num_thought},
                "total_tokens": used["total_tokens"],
            }
            if is_over
            else None,
            "instructions": None,
            "max_output_tokens": None,
            "temperature": 1.0,
            "top_p": 1.0,
            "tools": [],
            "tool_choice": "auto",
            "text": {"format": {"type": "text"}},
            "metadata": {},
            **self._echo,
        }
