"""Answers that must follow a schema or grammar: llguidance says after each token which ones may come next."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import llguidance.hf
from llguidance import LLMatcher, LLParserLimits

from expertly.core.errors import ConfigError
from expertly.core.untrusted import Bounds, check_value
from expertly.model.answer_formats import CallFormat, types_of
from expertly.model.answers import AnswerFormat, Stage
from expertly.model.sandbox import Sandbox
from expertly.serve.errors import invalid
from expertly.serve.schema import Constraint, Tool

BOUNDS = Bounds(256 << 10, depth=48, items=1024, text=16 << 10)
"""What a schema may have at most: of a constant of 20 000 characters each token takes 0.02 s."""

# Else the library makes tokens of all that must come next, anew for each: 0.5 s for names of 200 000 characters. The
# sandbox does: so it sees what comes behind the beginning.
_NO_FORCING = '%llguidance {"no_forcing": true}\n'

# Processor time and time to compile a grammar. It is done in a sandbox: the library ends for no limit. A multiple of
# 999 983 takes it 7 s, 1 000 properties 0.1 s.
COMPILE_CPU_S, COMPILE_S = 1.0, 4.0

COMPILE_NBYTES = 32 << 20  # memory of a compiled grammar

STACK_NBYTES = 256 << 20
"""Address space for the stack of the thread that compiles: a schema of MAX_REFERENCES needs a hundredth of it."""

PLAIN = AnswerFormat(thinks=False)  # of a text that is no chat's

_TOKEN = re.compile(r"<\[[^\]]*\]>")
_ANY = "/(?s:.*)/"

# Where a schema says more than its properties. Others forbid what they do not name: a model might name arguments for
# ever.
_OPEN = {"allOf", "anyOf", "oneOf", "$ref", "patternProperties"}

_BREAKS = re.compile(r"\\.|[/\n]", re.DOTALL)
_BETWEEN_SLASHES = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}
_LARK_TOKENS = re.compile(r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\\n])+/|//[^\n]*|<[^<>\s]+>')
"""Strings, patterns, comments, special tokens."""


class Rules:
    """Rules of a grammar as text. `tokens`: those that stand for themselves alone, which no text can, by their text."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self._tokens = tokens
        self._tokens_re = re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or r"(?!)")
        self.lines: list[str] = []

    def add(self, body: str, options: str = "") -> str:
        """The name of a new rule."""
        name = f"rule_{len(self.lines)}"
        self.lines.append(f"{name}{options}: {body}")
        return name

    def text(self, text: str) -> str:
        """Exactly `text`."""
        known, parts = self._tokens, re.split(f"({self._tokens_re.pattern})", text)
        return " ".join(f"<[{known[part]}]>" if part in known else quoted(part) for part in parts if part)

    def until(self, mark: str) -> str:
        """Any text up to `mark`, and `mark`."""
        if self._tokens_re.match(mark):
            return f"{_ANY} {self.text(mark)}"
        return self.add(_ANY, f"[suffix={quoted(mark)}]")

    def arguments(self, schema: dict[str, Any]) -> str:
        """JSON as templates write arguments, and so models."""
        return self.add(f"%json {_schema_text(schema, 'tools', item_separator=', ', key_separator=': ')}")

    def constraint(self, wish: Constraint, form: CallFormat) -> str:
        """What an answer is that follows it."""
        if wish.kind == "json":
            body = f"%json {_schema_text(wish.value, wish.param)}"
        elif wish.kind == "choice":
            body = " | ".join(map(quoted, wish.value))
        elif wish.kind == "regex":
            body = "/" + _BREAKS.sub(lambda match: _BETWEEN_SLASHES.get(match[0], match[0]), wish.value) + "/"
        else:
            numbers = {name: f"<[{token}]>" for name, token in self._tokens.items()}
            body = "%lark {\n" + _LARK_TOKENS.sub(lambda token: numbers.get(token[0], token[0]), wish.value) + "\n}"
        if form.kind != "harmony":
            return self.add(body)
        head = [self.text(part) for part in ("<|channel|>final", " <|constrain|>json", "<|message|>")]
        return f"{head[0]} ({head[1]})? {head[2]} {self.add(body)}"

    def call(self, form: CallFormat, tools: Sequence[Tool]) -> str:
        """One call of one of `tools`."""
        calls = []
        for number, tool in enumerate(tools):
            # a document of its own: its references are to its own definitions
            schema: dict[str, Any] = {"$id": f"urn:tool:{number}", "type": "object"} | (tool.function.parameters or {})
            if "properties" in schema and not _OPEN & schema.keys():
                schema = {"additionalProperties": False} | schema
            if form.kind == "object" and not form.open_mark:  # which the library can tell from another object
                properties = {"name": {"const": tool.function.name}, "parameters": schema}
                required = {"required": list(properties), "additionalProperties": False}
                calls.append(self.arguments({"type": "object", "properties": properties, **required}))
                continue
            written = form.section[0] + form.call.replace("{name}", tool.function.name) + form.section[1]
            before, _, behind = written.partition("{arguments}")
            for end in form.ends:
                behind = behind.replace(end, "")
            arguments = self._parameters(form, schema) if form.parameter else self.arguments(schema)
            calls.append(f"{self.text(before)} {arguments} {self.text(behind)}")
        return ("" if not form.open_mark else "/\\n?\\n?/ ") + self.add(" | ".join(calls))

    def _parameters(self, form: CallFormat, schema: dict[str, Any]) -> str:
        parts = []
        shared: dict[str, Any] = {name: schema[name] for name in ("$id", "$defs", "definitions") if name in schema}
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, dict) or not isinstance(required, list):
            raise invalid("tools: parameters: accepted: properties in an object, required in a list", "tools")
        for key, part in properties.items():
            is_text = types_of(schema, key) == {"string"}
            opening, _, closing = form.parameter.replace("{key}", key).partition("{value}")
            if not is_text:
                opening = opening.replace('string="true"', 'string="false"')
                whole = shared | part if isinstance(part, dict) else {}
                value = f"{self.arguments(whole)} {self.text(closing)}"
            elif "enum" in part or "const" in part:
                choices = self.add(" | ".join(map(quoted, part.get("enum", [part.get("const")]))))
                value = f"{choices} {self.text(closing)}"
            else:
                value = self.until(closing.lstrip())
            parts.append(self.add(f"{self.text(opening)} {value}") + "?" * (key not in required))
        return " ".join(parts)

    def thought(self, answers: AnswerFormat, stage: Stage) -> str:
        """The reasoning that may come before."""
        opening, closing = answers.calls.think
        if stage not in ("thinks", "may think") or (stage == "may think" and not answers.is_asked_to):
            return ""
        if answers.calls.kind == "harmony":
            closing += "<|start|>assistant"
            return self.until(closing) if stage == "thinks" else f"({self.text(opening)} {self.until(closing)})?"
        ended = f"{self.until(closing)} /\\n{{0,2}}/"
        return ended if stage == "thinks" else f"(/\\n?/ {self.text(opening)} {ended})?"


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


class Grammars:
    """Makes grammars for one tokenizer, in a thread of its own. Making the first one takes a moment."""

    def __init__(self, tokenizer: Any, vocabulary: int, ends: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._ends = list(ends)
        self._of_library: Any = None
        self._tokens: dict[str, int] = {}  # which the library matches by their numbers alone
        self._sandbox = Sandbox("grammars", ("llguidance",), COMPILE_CPU_S, COMPILE_S, COMPILE_NBYTES)
        self._thread = ThreadPoolExecutor(1, "expertly-serve-grammars")
        before = threading.stack_size(STACK_NBYTES)
        try:
            self._thread.submit(lambda: None)  # starts it
        finally:
            threading.stack_size(before)

    async def of_answer(
        self,
        wish: Constraint | None,
        answers: AnswerFormat = PLAIN,
        stage: Stage = "content",
        tools: Sequence[Tool] = (),
    ) -> LLMatcher:
        """A grammar of reasoning, then a call of one of `tools` or a text that follows `wish`. Raises ApiError."""
        form, param = answers.calls, "tools" if wish is None else wish.param

        def text(stage: Stage) -> str:
            rules = Rules(self._tokens)
            thought = rules.thought(answers, stage)
            bodies = [rules.call(form, tools)] if tools else []
            bodies += [rules.constraint(wish, form)] if wish is not None else []
            return "\n".join((f"start: {thought} ({' | '.join(bodies)})", *rules.lines))

        return await asyncio.get_running_loop().run_in_executor(self._thread, self._compiled, param, text, stage)

    def close(self) -> None:
        self._sandbox.close()
        self._thread.shutdown(cancel_futures=True)

    def _compiled(self, param: str, make: Callable[[Stage], str], stage: Stage) -> LLMatcher:
        """Compiles it in the sandbox, without the reasoning, and then here. Raises ApiError."""
        tokenizer, text = self._library(param), make(stage)
        if len(text) > BOUNDS.nbytes:
            raise invalid(f"{param}: a grammar of {len(text)} characters; accepted: {BOUNDS.nbytes}", param)
        try:
            tried = json.dumps({"text": _TOKEN.sub("<[257]>", make("content"))})
            letter, problem = self._sandbox.ask(tried.encode())
        except ConfigError as error:
            raise invalid(f"{param}: cannot be kept: compiling it {error}", param) from None
        if letter == b"T":
            grammar, limits = LLMatcher.grammar_from_lark(_NO_FORCING + text), LLParserLimits(verbose_errors=False)
            matcher = LLMatcher(tokenizer, grammar, limits=limits, log_level=0)
            if not matcher.is_error():
                return matcher
            problem = matcher.get_error()
        # without the library's state, which it puts between marks behind, and without the grammar
        problem = re.split(r"\n<|\n   1 \||; following special tokens", problem)[0]
        reason = " ".join(problem.rpartition("failed to compile JSON schema: ")[2].split())
        raise invalid(f"{param}: cannot be kept: {reason}", param)

    def _library(self, param: str) -> Any:
        """The tokenizer as the library has it. Raises ApiError."""
        if self._of_library is None:
            try:
                if not self._ends:
                    raise ValueError("the model has no token that ends a text")
                make = llguidance.hf.from_tokenizer
                known = make(self._tokenizer, n_vocab=self._vocabulary, eos_token=self._ends)
            except ValueError as error:
                sentence = f"{param}: cannot be had: the model's tokenizer cannot be constrained: {error}"
                raise invalid(sentence, param, "unsupported_value") from None
            added = self._tokenizer.get_added_vocab().items()
            self._tokens = {name: token for name, token in added if known.is_special_token(token)}
            self._of_library = known
        return self._of_library


def _schema_text(schema: dict[str, Any], param: str, **options: str) -> str:
    """A schema as the library is given it; JSON in one line, as models may write spaces for ever. Raises ApiError."""
    text = json.dumps({**schema, "x-guidance": {"whitespace_flexible": False, **options}})
    if len(text) > BOUNDS.nbytes:
        raise invalid(f"{param}: {len(text)} characters; accepted: {BOUNDS.nbytes}", param)
    try:
        check_value(schema, param, BOUNDS, ConfigError)
    except ConfigError as error:
        raise invalid(str(error), param) from None
    return text
