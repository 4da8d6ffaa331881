"""The requests that are taken: OpenAI's, as far as a text model on one machine can serve them.

Unknown fields are refused, as OpenAI does. Fields of OpenAI's that change nothing here (`user`, `metadata`, `store`)
are taken and have no effect; those that would change the answer and cannot be served are refused by their values.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator, model_validator

from expertly.serve.sampling import MAX_TOP_LOGPROBS, Sampling

MAX_CHOICES = 16
"""Texts that one request may ask for: `n`, times its prompts."""

MAX_STOPS = 16
MAX_TOKEN = 2**31 - 1

Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Token = Annotated[int, Field(ge=0, le=MAX_TOKEN)]
Stop = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Bias = Annotated[float, Field(ge=-100, le=100)]
TokenKey = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Count = Annotated[int, Field(ge=1, le=MAX_TOKEN)]


class Strict(BaseModel):
    """No field that is not declared, no text where a number belongs."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: bool | None = Field(default=None, description="taken and has no effect")


class Generation(Strict):
    """What both ways of asking have."""

    model: str = Field(max_length=512)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = Field(default=None, description="default: 1")
    top_p: Annotated[float, Field(gt=0, le=1)] | None = Field(default=None, description="default: 1")
    top_k: Annotated[int, Field(ge=0, le=MAX_TOKEN)] | None = Field(
        default=None, description="not OpenAI's: of how many tokens; 1 is greedy, 0 is all"
    )
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    seed: Seed | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[TokenKey, Bias], Field(max_length=1024)] | None = None
    user: Annotated[str, Field(max_length=512)] | None = Field(default=None, description="taken and has no effect")

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> Generation:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only for stream=true")
        return self

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def sampling(self, logprobs: int | None) -> Sampling:
        return Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=self.top_k or 0,
            seed=None if self.seed is None else self.seed % 2**64,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            bias={int(token): bias for token, bias in (self.logit_bias or {}).items()},
            logprobs=logprobs,
        )


class TextPart(Strict):
    type: Literal["text"]
    text: str


class CalledFunction(Strict):
    name: Annotated[str, Field(max_length=256)]
    arguments: str = Field(description="JSON, as text")


class ToolCall(Strict):
    id: Annotated[str, Field(max_length=256)]
    type: Literal["function"]
    function: CalledFunction


Content = str | Annotated[list[TextPart], Field(max_length=256)]


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: Annotated[str, Field(max_length=256)] | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=128)] | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None
    refusal: str | None = Field(default=None, description="taken and has no effect")

    @model_validator(mode="after")
    def _has_what_its_role_needs(self) -> Message:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError("content is required, except of an assistant that calls tools")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls are an assistant's")
        if self.role == "tool" and not self.tool_call_id:
            raise ValueError("tool_call_id is required of a tool's message")
        return self

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class Function(Strict):
    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(default=None, description="taken and has no effect: nothing constrains what is written")


class Tool(Strict):
    type: Literal["function"]
    function: Function


class ResponseFormat(Strict):
    type: Literal["text"]


class ChatRequest(Generation):
    messages: Annotated[list[Message], Field(min_length=1, max_length=2048)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = Field(default=None, description="the newer name of max_tokens")
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto"] | None = Field(
        default=None, description="a call cannot be forced: nothing constrains what is written"
    )
    parallel_tool_calls: bool | None = Field(default=None, description="taken and has no effect")
    response_format: ResponseFormat | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = Field(
        default=None, description="taken and has no effect"
    )
    store: bool | None = Field(default=None, description="taken and has no effect: nothing is stored")
    service_tier: Literal["auto", "default"] | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is only for logprobs=true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens are the same thing; accepted: one of them")
        return self

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    @property
    def offered(self) -> list[Tool]:
        """The tools that the model is told of."""
        return [] if self.tool_choice == "none" else list(self.tools or ())


Prompts = (
    str
    | Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES)]
    | Annotated[list[Token], Field(min_length=1)]
    | Annotated[list[Annotated[list[Token], Field(min_length=1)]], Field(min_length=1, max_length=MAX_CHOICES)]
)


class CompletionRequest(Generation):
    prompt: Prompts
    max_tokens: Count | None = Field(default=None, description="default: 16")
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = Field(default=None, description="n, if anything")
    suffix: None = None

    @field_validator("suffix", mode="before")
    @classmethod
    def _no_suffix(cls, value: Any) -> Any:
        if value is not None:
            raise ValueError("text is continued, not filled in; accepted: null")
        return value

    @model_validator(mode="after")
    def _can_be_served(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError("best_of is not chosen among; accepted: the value of n")
        if self.echo and self.logprobs is not None:
            raise ValueError("echo gives no logprobs of the prompt; accepted: one of them")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One a text, as text or as tokens."""
        prompt: Any = self.prompt
        if isinstance(prompt, str) or isinstance(prompt[0], int):
            return [prompt]
        return list(prompt)
