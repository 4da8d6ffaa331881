"""`expertly run`: chat with a model, or answer one prompt.

Its experts live in the memory you give them. The line after an answer says how many of the experts were in memory when
they were needed.
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TextIO

from expertly.cli.output import in_brackets, message, print_json, progress_bar, reserved_stdout
from expertly.core.errors import ConfigError
from expertly.core.units import format_nbytes, format_share
from expertly.engine.process import give_back_code
from expertly.options import (
    ADVANCED,
    MODEL_HELP,
    LoadOptions,
    argument,
    json_flag,
    one_of,
    option,
    probability,
    seed,
    temperature,
)

if TYPE_CHECKING:
    from expertly.cli.chat import Chat

DEFAULT_NEW_TOKENS = 1024

HELP = """\
  /system TEXT    begin anew with a system message
  /stats          experts hit and missed so far
  /clear          begin anew; a system message stays
  /quit           end, as Ctrl-D does"""


@dataclass(frozen=True, kw_only=True)
class RunOptions(LoadOptions):
    model: str | None = argument(None, MODEL_HELP, metavar="MODEL")
    prompt: str | None = argument(
        None, 'answered once; "-", or without a terminal: read from stdin; without a prompt: chat', metavar="PROMPT"
    )
    max_new_tokens: int | None = option(
        None, f"of an answer (default: {DEFAULT_NEW_TOKENS}, at most a quarter of the positions)", least=1
    )
    temperature: float | None = option(None, "0 is greedy (default: the model's own)", metavar="X", type=temperature)
    top_p: float | None = option(None, "nucleus sampling (default: the model's own)", metavar="X", type=probability)
    seed: int | None = option(None, "makes answers repeatable", metavar="N", type=seed)
    speculate: str = option(
        "off",
        "prompt-lookup: draft what follows the last words where they stand earlier in the text, and verify several "
        "tokens in one pass, for answers that repeat their prompt; or off",
        metavar="NAME",
        type=one_of("off", "prompt-lookup"),
        panel=ADVANCED,
    )
    raw: bool = option(False, "continue the text, without chat template")
    stats: bool = option(False, "add tables of hits and misses by layer")
    json: bool = json_flag()


def run(args: RunOptions) -> int:
    prompt = _read_prompt(args)
    if prompt is None and args.json:
        raise ConfigError("json: a chat is for people; accepted: with a PROMPT")
    with reserved_stdout() as stdout:
        give_back_code()  # a third of the memory by now
        from expertly import api
        from expertly.cli.chat import Chat, ChatSampling
        from expertly.model.generation import check_length, check_some, max_positions
        from expertly.model.prompts import tokens_of

        def context(tokenizer: Any) -> int:
            """Tokens of the one answer and what it answers."""
            asked = [{"role": "user", "content": prompt or ""}]
            tokens = [] if tokenizer is None else check_some(tokens_of(tokenizer, asked, is_raw=args.raw))
            return len(tokens) + (args.max_new_tokens or DEFAULT_NEW_TOKENS)

        room = args.context if prompt is None else args.context or context
        model, tokenizer = load_model(args.model, args, context=room)
        try:
            if tokenizer is None:
                raise ConfigError(f"model={args.model!r}: has no tokenizer, so there is no text to answer")
            if args.memory == "auto" or args.total_memory is not None:
                message(f"expertly: {api.stats(model).memory_reason}")
            if args.max_new_tokens is not None:
                check_length(model, args.max_new_tokens)
            new_tokens = args.max_new_tokens or min(DEFAULT_NEW_TOKENS, (max_positions(model) or sys.maxsize) // 4)
            looks_up = args.speculate == "prompt-lookup"
            sampling = ChatSampling(new_tokens, args.temperature, args.top_p, args.seed, looks_up=looks_up)
            conversation = Chat(model, tokenizer, sampling, is_raw=args.raw)
            if conversation.is_raw and not args.raw:
                message("expertly: the model has no chat template: it continues the text")
            if prompt is not None:
                return _answer_once(conversation, model, prompt, args, stdout)
            _chat(conversation, model, stdout)
        finally:
            api.unload(model)
    return 0


def load_model(model: str | None, options: LoadOptions, **changed: Any) -> tuple[Any, Any]:
    """A model and its tokenizer (None where it has none); `changed` replaces options."""
    from expertly import api

    with progress_bar() as progress:
        loaded, tokenizer = api.open_model(model, replace(options, **changed), progress)
    say_system(loaded)
    if options.quantize is not None:
        message(f"expertly: experts are {api.handle(loaded).store.manifest.rounding}")
    return loaded, tokenizer


def say_system(loaded: Any) -> None:
    """Tell the user which system `auto` chose, in a terminal."""
    from expertly import api

    reason = api.stats(loaded).system_reason
    if reason is not None and sys.stderr.isatty():
        message(f"expertly: {reason}")


def _read_prompt(args: RunOptions) -> str | None:
    """The prompt of the command line or of stdin; None: chat."""
    prompt = args.prompt
    if prompt is None and sys.stdin.isatty():
        return None
    if prompt is None or prompt == "-":
        prompt = sys.stdin.read()
    prompt.encode()  # bytes that are no UTF-8 may have come as lone surrogates, which this refuses
    return prompt


def _answer_once(conversation: Chat, model: Any, prompt: str, args: RunOptions, out: TextIO) -> int:
    """Returns the exit code: 130 where Ctrl-C stopped the answer."""
    answer = conversation.answer(prompt, (lambda text: None) if args.json else lambda text: _write(out, text))
    measures = {**answer.facts(), "model": args.model or "demo", "prompt": prompt, **_measures(model)}
    if args.json:
        print_json({key: value for key, value in measures.items() if key != "layers" or args.stats}, out)
    else:
        _write(out, f"\n\n{answer.line()}\n{_budget(measures)}\n")
        if args.stats:
            from expertly.cli.stats_report import report

            _write(out, f"\n{report(measures)}\n")
    return 130 if answer.was_stopped else 0


def _chat(conversation: Chat, model: Any, out: TextIO) -> None:
    """Read messages and answer them until the input ends."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - what `input` edits lines with
    message(
        f"expertly: {_budget(_measures(model))} /help says what else you can type; Ctrl-C stops an answer, Ctrl-D ends"
    )
    while True:
        try:
            try:
                with contextlib.redirect_stdout(out):
                    text = input("> ").strip()
            except KeyboardInterrupt:  # of a line that was being written
                _write(out, "\n")
                continue
            text.encode()  # what is no UTF-8 may come as lone surrogates
            if text == "/quit":
                return
            if text.startswith("/"):
                _write(out, _command(conversation, model, text) + "\n")
            elif text:
                answer = conversation.answer(text, lambda piece: _write(out, piece))
                _write(out, f"\n{answer.line()}\n")
        except UnicodeError as error:
            message(f"expertly: a message must be UTF-8 ({error})")
        except ConfigError as error:
            message(f"expertly: {error}")
        except EOFError:
            _write(out, "\n")
            return


def _command(conversation: Chat, model: Any, text: str) -> str:
    """Run a line that begins with a slash; returns what to print."""
    name, _, rest = text.partition(" ")
    if name in ("/system", "/clear"):
        conversation.begin_anew(rest.strip() if name == "/system" else None)
        return "[a new conversation]"
    if name == "/stats":
        from expertly import api
        from expertly.cli.stats_report import phase_table

        return phase_table(api.stats(model).as_dict()["phases"])
    return HELP if name == "/help" else f"[{name} is none of these]\n{HELP}"


def _measures(model: Any) -> dict[str, Any]:
    from expertly import api
    from expertly.engine.process import peak_rss_nbytes

    return {
        **api.stats(model).as_dict(),
        "device": str(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "peak_rss_bytes": peak_rss_nbytes(),
    }


def _budget(measures: dict[str, Any]) -> str:
    """How much of the experts is in memory, and for a system that predicts how well it did."""
    memory, experts = measures["memory_bytes"], measures["expert_bytes"]
    share = f"{format_nbytes(memory)} = {format_share(memory / experts)} of {format_nbytes(experts)}"
    parts = [f"{share} of experts in memory"]
    if measures["rounding"] is not None:
        parts.append(f"rounded to {measures['rounding']['to']}")
    parts.append(f"system {measures['system']}")
    prediction, decode = measures["prediction"], measures["phases"]["decode"]
    if prediction is not None:
        accuracy, coverage = format_share(decode["accuracy"]), format_share(decode["coverage"])
        parts.append(f"prefetch accuracy {accuracy}, coverage {coverage}")
        if prediction["failed"] is not None:
            parts.append(f"prediction failed: {prediction['failed']}")
    return in_brackets(*parts)


def _write(out: TextIO, text: str) -> None:
    out.write(text)
    out.flush()
