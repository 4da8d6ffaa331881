"""The requests that are accepted: OpenAI's, as far as a text model on one machine can serve them.

A field that would change an answer and is not declared here is an error, unless its value asks for nothing. Any other
undeclared field is accepted and has no effect; `Strict.unknown_fields` names it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, model_validator

from expertly.serve.sampling import Sampling

MAX_CHOICES = 16  # prompts of a request, and texts behind each

MAX_TOKEN = 2**31 - 1

Whole = Annotated[
    int, BeforeValidator(lambda value: int(value) if isinstance(value, float) and value % 1 == 0 else value)
]
"""A whole number, which some clients write as 5.0."""

Token = Annotated[int, Field(ge=0, le=MAX_TOKEN)]
Stop = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Biases = dict[Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]]
Penalty = Annotated[float, Field(ge=-2, le=2)]
SomeTokens = Annotated[list[Token], Field(max_length=1 << 20, fail_fast=True)]
Tokens = Annotated[SomeTokens, Field(min_length=1)]
Count = Annotated[Whole, Field(ge=1)]
Limit = Annotated[Count | None, BeforeValidator(lambda value: None if value == -1 else value)]
"""Tokens to write, at most; None, and -1 as other servers have it: as many as the context leaves."""
Name = Annotated[str, Field(max_length=256)]
FunctionLabel = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
Variables = Annotated[dict[str, Any], Field(max_length=64)]
"""Of the chat template."""
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

NOTHING: tuple[Any, ...] = (None, False, 0, "", [], {})
NEUTRAL: dict[str, tuple[Any, ...]] = {"skip_special_tokens": (None, True), "prompt_logprobs": (None,)}
NEUTRAL |= dict.fromkeys(("n", "best_of", "typical_p", "length_penalty", "repeat_penalty"), (*NOTHING, 1))
"""Values of a field that ask for nothing, where they are not NOTHING."""


class Strict(BaseModel):
    """A model that accepts no text in place of a number. `cannot`: what would change an answer and cannot be had, where
    it is no field of the model; and what would be accepted.

    A ValueError of a validator begins with the field and a colon.
    """

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
    cannot: ClassVar[dict[str, str]] = {}

    @model_validator(mode="after")
    def _asks_for_nothing_else(self) -> Strict:
        for name, value in (self.model_extra or {}).items():
            if name in self.cannot and value not in NEUTRAL.get(name, NOTHING):
                raise ValueError(f"{name}: {self.cannot[name]}")
        return self

    def unknown_fields(self, path: str = "") -> Iterator[str]:
        """Fields that nothing reads, as `messages.audio`, and tools that other servers have, as `tools.web_search`."""
        yield from (path + name for name in self.model_extra or ())
        for name in self.model_fields_set & type(self).model_fields.keys():
            value = getattr(self, name)
            for item in value if isinstance(value, list) else [value]:
                if isinstance(item, AnyTool) and item is not value:
                    yield f"{path}{name}.{item.label}"
                elif isinstance(item, Strict):
                    yield from item.unknown_fields(f"{path}{name}.")


class AnyTool(Strict):
    """A tool by its name, or by its type where that has a single one; nothing reads the rest."""

    type: Name | None = None
    name: Name | None = None
    namespace: Name | None = None  # of a function, as codex groups them

    @property
    def label(self) -> str:
        return self.name or self.type or ""


CANNOT = {name: sentence for names, sentence in {
    "json_schema response_format output_format": "use response_format, output_config.format or text.format",
    "structured_outputs guided_json guided_regex guided_choice guided_grammar grammar":
        "use response_format, or structured_outputs.json, structured_outputs.regex, .choice or .grammar (llguidance's)",
    "max_tokens max_completion_tokens max_output_tokens max_new_tokens n_predict":
        "use max_tokens, of /v1/responses max_output_tokens",
    "n best_of logprobs top_logprobs prompt_logprobs echo": "use n and logprobs of /v1/chat/completions",
    "typical_p top_a tfs_z mirostat dry_multiplier xtc_probability no_repeat_ngram_size length_penalty repeat_penalty":
        "use temperature, top_p, top_k, min_p and repetition_penalty",
    "use_beam_search include_stop_str_in_output skip_special_tokens suffix truncate_prompt_tokens chat_template":
        "this server has only what is the default",
    "stop_sequences": "use stop",
    "bad_words": "use logit_bias: -100 for what may not come",
    "thinking enable_thinking reasoning reasoning_effort chat_template_kwargs":
        "use reasoning_effort, output_config.effort or reasoning.effort, or chat_template_kwargs",
    "documents audio mcp_servers web_search_options": "this is a text model by itself; use messages and tools",
    "system instructions messages": "use a message of /v1/chat/completions",
    "tools functions function_call": "use tools and tool_choice of /v1/chat/completions",
    "previous_response_id conversation background prompt": "nothing is stored; send what was said",
}.items() for name in names.split()}  # fmt: skip
"""Of all APIs: fields that would change an answer, those of other APIs among them, and what is accepted instead."""


class Tuning(Strict):
    """What all APIs share: OpenAI's fields, then those of other servers."""

    model: Annotated[str, Field(max_length=512)] | None = None  # default: the one that there is
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None  # defaults: those of Sampling
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16, fail_fast=True)] | None = None
    seed: Annotated[Whole, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[Biases, Field(max_length=1024)] | None = None
    top_k: Annotated[Whole, Field(ge=-1, le=MAX_TOKEN)] | None = None  # 1 is greedy, 0 and -1 are all
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None  # beside the model's own
    stop_token_ids: Annotated[list[Token], Field(max_length=256, fail_fast=True)] | None = None
    min_tokens: Annotated[Whole, Field(ge=0)] | None = None
    allowed_token_ids: Annotated[Tokens, Field(max_length=1024)] | None = None
    ignore_eos: bool | None = None  # what would end a text does not; a grammar does
    cannot: ClassVar[dict[str, str]] = CANNOT

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    def sampling(self, logprobs: int | None) -> Sampling:
        shared = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
        return Sampling(
            **{name: value for name in shared if (value := getattr(self, name)) is not None},
            top_k=max(0, self.top_k or 0),
            seed=None if self.seed is None else self.seed % 2**64,
            bias={int(token): bias for token, bias in (self.logit_bias or {}).items()},
            logprobs=logprobs,
            min_tokens=self.min_tokens or 0,
            allowed_token_ids=self.allowed_token_ids,
        )


class StreamOptions(Strict):
    include_usage: bool | None = None


class NamedSchema(Strict):
    name: Name = "response"
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(Strict):
    """`json_object` is any JSON object, or one that follows `schema`. The chat API has the schema in `json_schema`, the
    other APIs have it and its name here.
    """

    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    json_schema: NamedSchema | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")

    @model_validator(mode="after")
    def _has_a_schema(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None and self.schema_ is None:
            raise ValueError("json_schema: required for type json_schema, or schema")
        return self


class StructuredOutputs(Strict):
    """What an answer must follow, by vLLM's names. `grammar`: in the syntax of llguidance."""

    json_: dict[str, Any] | None = Field(default=None, alias="json")
    regex: Annotated[str, Field(min_length=1)] | None = None
    choice: Annotated[list[str], Field(min_length=1, max_length=1024, fail_fast=True)] | None = None
    grammar: Annotated[str, Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _is_one(self) -> StructuredOutputs:
        if len(self.model_dump(exclude_none=True, include=set(type(self).model_fields))) != 1:
            raise ValueError("json: accepted: one of json, regex, choice and grammar")
        return self


@dataclass(frozen=True, slots=True)
class Constraint:
    """What a text must follow, and the field that says so."""

    kind: str  # "json", "regex", "choice" or "grammar"
    value: Any
    param: str


class Generation(Tuning):
    """The fields that chat and completion requests share."""

    stream_options: StreamOptions | None = None
    n: Annotated[Whole, Field(ge=1, le=MAX_CHOICES)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    @property
    def constraint(self) -> Constraint | None:
        """What an answer must follow; None where any text will do."""
        wish, other = self.response_format, self.structured_outputs
        if other is not None:
            ((kind, value),) = other.model_dump(exclude_none=True, include=set(type(other).model_fields)).items()
            return Constraint(kind.rstrip("_"), value, "structured_outputs")
        if wish is None or wish.type == "text":
            return None
        schema = (wish.json_schema or wish).schema_
        return Constraint("json", {"type": "object"} if schema is None else schema, "response_format")

    @model_validator(mode="after")
    def _follows_one(self) -> Generation:
        if self.structured_outputs is not None and self.response_format not in (None, ResponseFormat(type="text")):
            raise ValueError("structured_outputs: accepted: it or response_format")
        return self


class TextPart(Strict):
    type: Literal["text", "input_text", "output_text"]
    text: str


Content = str | Annotated[list[TextPart], Field(max_length=256, fail_fast=True)]

SHOWN = ("title", "url", "source", "context", "text", "content", "data", "stdout", "stderr", "error_code")
"""Of blocks that other servers made, and of documents: what the model is told."""


def shown(block: Any) -> list[str]:
    """The texts of such a block."""
    if isinstance(block, list):
        return [text for part in block for text in shown(part)]
    if not isinstance(block, dict) or block.get("type") in ("base64", "image"):
        return [block] if isinstance(block, str) and block else []
    if isinstance(asked := block.get("input"), dict):
        return [f"{block.get('name')}: {json.dumps(asked, ensure_ascii=False)}"]
    return [text for name in SHOWN for text in shown(block.get(name))]


class ResultPart(Strict):
    """A part of what a tool gave. Its agent cannot take it back, so that the model is told what it does not see."""

    type: Name
    text: str | None = None

    @model_validator(mode="after")
    def _says_something(self) -> ResultPart:
        kind = self.type.removeprefix("input_")
        if self.text is None and kind.endswith("text"):
            raise ValueError(f"text: required of a part of type {self.type}")
        if self.text is None:
            texts = shown({"type": kind, **(self.model_extra or {})})
            self.text = "\n".join(texts) or f"[{kind} left out: this model reads only text]"
        return self


Result = str | Annotated[list[ResultPart], Field(max_length=256, fail_fast=True)]


def texts(content: Content | Result | None) -> list[str]:
    return [content] if isinstance(content, str) else [part.text or "" for part in content or ()]


class CalledFunction(Strict):
    name: Name
    arguments: str  # JSON, as text


class ToolCall(Strict):
    id: Name
    type: Literal["function"]
    function: CalledFunction


OF_RENDERER = {"self", "conversations", "messages", "tools", "documents", "chat_template"}
OF_RENDERER |= {"add_generation_prompt", "continue_final_message", "return_assistant_tokens_mask"}
"""What the renderer of chat templates is told by these names, from other fields."""


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: Name | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=128, fail_fast=True)] | None = None
    tool_call_id: Name | None = None
    reasoning_content: str | None = Field(default=None, validation_alias=AliasChoices("reasoning_content", "reasoning"))
    cannot: ClassVar[dict[str, str]] = {"prefix": "use continue_final_message", "function_call": "use tool_calls"}

    @model_validator(mode="after")
    def _has_what_its_role_needs(self) -> Message:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError("content: required, except of an assistant that calls tools")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls: only an assistant has them")
        if self.role == "tool" and not self.tool_call_id:
            raise ValueError("tool_call_id: required of a tool's message")
        return self

    @classmethod
    def calling(cls, id: str, name: str, arguments: str) -> Message:
        """An assistant's, of one call."""
        call = ToolCall(id=id, type="function", function=CalledFunction(name=name, arguments=arguments))
        return cls(role="assistant", tool_calls=[call])

    @property
    def text(self) -> str:
        return "".join(texts(self.content))


def joined(messages: Iterable[Message]) -> list[Message]:
    """The same as templates want them: what one role says in a row is one message, and only the first is a system's.
    What a system says later is told as a user's, where agents put it.
    """
    result: list[Message] = []
    for message in messages:
        role: Any = "system" if message.role == "developer" else message.role
        text, thought, calls = message.text, message.reasoning_content, message.tool_calls or []
        if role == "system" and any(before.role != "system" for before in result):
            role, text = "user", f"<system-reminder>\n{text}\n</system-reminder>"
        if result and result[-1].role == role != "tool":
            before = result.pop()
            text = "\n\n".join(filter(None, (before.text, text)))
            thought = "\n\n".join(filter(None, (before.reasoning_content, thought))) or None
            calls = [*(before.tool_calls or ()), *calls]
        said = {"role": role, "content": text, "reasoning_content": thought, "tool_calls": calls or None}
        result.append(message.model_copy(update=said))
    return result


class Function(Strict):
    name: FunctionLabel
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # no effect: calls that tool_choice forces are always strict


class Tool(Strict):
    type: Literal["function"]
    function: Function


class Wish(Strict):
    """How to answer: output_config of one API, reasoning and text of another."""

    effort: Effort | None = None
    format: ResponseFormat | None = None


def functions(tools: Iterable[object] | None) -> list[dict[str, Any]]:
    """The tools of another API that are functions, as the chat API has them."""
    return [{"type": "function", "function": tool} for tool in tools or () if isinstance(tool, Function)]


Choice = Literal["none", "auto", "required", "any"]
"""Of tools; "any" is other servers' word for "required"."""


class ChatRequest(Generation):
    messages: Annotated[list[Message], Field(min_length=1, max_length=2048, fail_fast=True)]
    max_tokens: Limit = None
    max_completion_tokens: Limit = None  # the newer name of max_tokens
    logprobs: bool | None = None
    top_logprobs: Annotated[Whole, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], Field(max_length=1024, fail_fast=True)] | None = None
    tool_choice: Choice | Tool | None = None
    parallel_tool_calls: bool | None = None  # false: only the first call is told
    reasoning_effort: Effort | None = None  # told to the chat template; one that does not read it thinks as it likes
    chat_template_kwargs: Variables | None = None  # not OpenAI's: more variables for the chat template
    continue_final_message: bool | None = None  # not OpenAI's: the answer goes on where the last message ends
    add_generation_prompt: bool | None = None  # not OpenAI's: false: the template opens no answer
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None  # this is a text model

    @model_validator(mode="after")
    def _fields_agree(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: only for logprobs=true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens: the same thing as max_completion_tokens; accepted: one of them")
        if self.forced == []:
            accepted = [tool.function.name for tool in self.offered] or "auto or none"
            choice = self.tool_choice.function.name if isinstance(self.tool_choice, Tool) else self.tool_choice
            raise ValueError(
                f"tool_choice: {choice!r:.80} without such a function, others are ignored; accepted: {accepted}"
            )
        for name in OF_RENDERER & (self.chat_template_kwargs or {}).keys():
            accepted = "variables that only the chat template reads; others are fields of the request"
            raise ValueError(f"chat_template_kwargs.{name}: accepted: {accepted}")
        last = self.messages[-1]
        if self.continue_final_message and (last.role != "assistant" or last.tool_calls or not last.text):
            raise ValueError("continue_final_message: accepted: where the last message is an assistant's text")
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("add_generation_prompt: accepted: false with continue_final_message")
        if self.continue_final_message and (self.forced is not None or self.constraint is not None):
            sentence = "what was begun would not be checked; accepted: no schema, grammar or forced call with it"
            raise ValueError(f"continue_final_message: {sentence}")
        return self

    @property
    def forced(self) -> list[Tool] | None:
        """The tools of which one must be called; None where none must."""
        if isinstance(self.tool_choice, Tool):
            name = self.tool_choice.function.name
            return [tool for tool in self.offered if tool.function.name == name]
        return self.offered if self.tool_choice in ("required", "any") else None

    @property
    def variables(self) -> dict[str, Any]:
        """Variables for the chat template, beside messages and tools."""
        effort = self.reasoning_effort
        thinking = {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none"}
        goes_on = bool(self.continue_final_message)
        begins = not goes_on and self.add_generation_prompt is not False
        ending = {"continue_final_message": goes_on, "add_generation_prompt": begins}
        return ending | thinking | (self.chat_template_kwargs or {})

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    @property
    def offered(self) -> list[Tool]:
        """The tools that the model is told about."""
        return [] if self.tool_choice == "none" else list(self.tools or ())


Prompts = (
    str
    | Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
    | Tokens
    | Annotated[list[Tokens], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
)


class CompletionRequest(Generation):
    prompt: Prompts
    max_tokens: Limit = 16  # OpenAI's default
    logprobs: Annotated[Whole, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: Whole | None = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One prompt for each text, as text or as tokens."""
        prompt: Any = self.prompt
        return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt


class TokenizeRequest(Strict):
    """vLLM's: a `prompt`, or the fields of a chat request."""

    model: Name | None = None
    prompt: str | None = None
    add_special_tokens: bool = True  # to a prompt; a chat template writes its own
    return_token_strs: bool | None = None


class DetokenizeRequest(Strict):
    model: Name | None = None
    tokens: SomeTokens
