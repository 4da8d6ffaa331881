"""`expertly run`: chat with a model, or answer one prompt.

Its experts live in the memory you give them. The line after an answer says how many of the experts were in memory when
they were needed.
"""

from __future__ import annotations

import os
import select
import stat
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

PIPE_S = 2.0  # how long a pipe may bring nothing before a user is told that it is waited for


@dataclass(frozen=True, kw_only=True)
class RunOptions(LoadOptions):
    model: str | None = argument(None, MODEL_HELP, metavar="MODEL")
    prompt: str | None = argument(
        None,
        'answered once, with what a pipe brings behind it; "-": from stdin; without a prompt: chat',
        metavar="PROMPT",
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
    plain: bool = option(False, "show answers as they are, not as Markdown", panel=ADVANCED)
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
            from expertly.cli import terminal
            from expertly.cli.stats_report import phase_table

            keys = "/help says what else you can type; Ctrl-C stops an answer, Ctrl-D ends"
            message(f"expertly: {_budget(_measures(model))} {keys}")
            terminal.chat(
                conversation,
                lambda: phase_table(api.stats(model).as_dict()["phases"]),
                stdout,
                is_plain=args.plain or conversation.is_raw,
            )
        finally:
            api.unload(model)
    return 0


def load_model(model: str | None, options: LoadOptions, **changed: Any) -> tuple[Any, Any]:
    """A model and its tokenizer (None where it has none); `changed` replaces options."""
    from expertly import api

    with progress_bar() as progress:
        loaded, tokenizer = api.open_model(model, replace(options, **changed), progress)
    say_choices(loaded, options)
    return loaded, tokenizer


def say_choices(loaded: Any, options: LoadOptions) -> None:
    """Tell the user which system `auto` chose, in a terminal; and what is rounded, as was asked for."""
    from expertly import api

    view = api.stats(loaded)
    if view.system_reason is not None and sys.stderr.isatty():
        message(f"expertly: {view.system_reason}")
    if options.quantize is not None:
        message(f"expertly: experts are {api.handle(loaded).store.manifest.rounding}")
    if view.kv is not None:
        cost = f"{view.kv['divergence']:.2g} nats a token, KL divergence on a short text"
        message(f"expertly: the KV cache is rounded to 8 bits, so tokens are not the model's own: {cost}")


def _read_prompt(args: RunOptions) -> str | None:
    """The prompt of the command line, of stdin, or of both; None: chat."""
    prompt = args.prompt
    if prompt is None and sys.stdin.isatty():
        return None
    if prompt is None or prompt == "-":
        prompt = sys.stdin.read()
        if not prompt:
            raise ConfigError("prompt: nothing came from stdin; accepted: some text")
    elif _brings_text(sys.stdin):
        prompt = "\n\n".join(filter(None, (prompt, sys.stdin.read().strip("\n"))))
    prompt.encode()  # bytes that are no UTF-8 may have come as lone surrogates, which this refuses
    return prompt


def _brings_text(stdin: TextIO) -> bool:
    """Whether stdin is a pipe or a file, beside a prompt."""
    try:
        mode = os.fstat(stdin.fileno()).st_mode
    except (OSError, ValueError):  # it is closed
        return False
    if stat.S_ISFIFO(mode) and not select.select([stdin], [], [], PIPE_S)[0]:
        message("expertly: reading the rest of the prompt from stdin, until that ends")
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def _answer_once(conversation: Chat, model: Any, prompt: str, args: RunOptions, out: TextIO) -> int:
    """Returns the exit code: 130 where Ctrl-C stopped the answer."""
    from expertly.cli.rendering import shown

    if args.json:
        answer = conversation.answer(prompt, lambda text: None)
    else:
        with shown(out, args.plain or conversation.is_raw) as write:
            answer = conversation.answer(prompt, write)
    measures = {**answer.facts(), "model": args.model or "demo", "prompt": prompt, **_measures(model)}
    if args.json:
        print_json({key: value for key, value in measures.items() if key != "layers" or args.stats}, out)
    else:  # to stdout only where that is a terminal: else it gets the answer and nothing more
        lines = [answer.line(), _budget(measures)]
        if args.stats:
            from expertly.cli.stats_report import report

            lines += ["", report(measures)]
        print(*([""] if out.isatty() else []), *lines, sep="\n", file=out if out.isatty() else sys.stderr, flush=True)
    return 130 if answer.was_stopped else 0


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
    if measures["kv"] is not None:
        parts.append("KV cache in 8 bits")
    parts.append(f"system {measures['system']}")
    prediction, decode = measures["prediction"], measures["phases"]["decode"]
    if prediction is not None:
        accuracy, coverage = format_share(decode["accuracy"]), format_share(decode["coverage"])
        parts.append(f"prefetch accuracy {accuracy}, coverage {coverage}")
        if prediction["failed"] is not None:
            parts.append(f"prediction failed: {prediction['failed']}")
    return in_brackets(*parts)
