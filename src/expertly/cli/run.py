"""`expertly run`: a chat with a model whose experts live in the memory stated, or one answer to a prompt."""

from __future__ import annotations

import argparse
import contextlib
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from expertly.cli.arguments import positive_int, probability, seed, temperature
from expertly.cli.loading import add_loading_arguments, load_model
from expertly.cli.output import add_json_flag, format_nbytes, format_share, message, print_json, reserved_stdout, table
from expertly.core.errors import ConfigError

if TYPE_CHECKING:
    from expertly.cli.chat import Chat

COMMANDS = {
    "/system TEXT": "begin anew with a system message",
    "/stats": "experts hit and missed so far",
    "/clear": "begin anew; a system message stays",
    "/save FILE": "write the conversation as JSON",
    "/quit": "end, as Ctrl-D does",
}


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("run", help="chat with a model, or answer one prompt", description=__doc__)
    add = parser.add_argument
    add_loading_arguments(parser)
    add("prompt", nargs="?", metavar="PROMPT", help='answered once; "-", or no terminal: read from stdin')
    add("--raw", action="store_true", help="continue the text as it is, without the model's chat template")
    add("--max-new-tokens", type=positive_int, default=1024, metavar="N", help="of an answer (default: 1024)")
    add("--temperature", type=temperature, metavar="X", help="0: greedy (default: the model's own)")
    add("--top-p", type=probability, metavar="X", help="default: the model's own")
    add("--seed", type=seed, metavar="N", help="makes answers repeatable")
    add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    prompt = _read_prompt(args)
    if prompt is None and args.json:
        raise ConfigError("json: a chat is for people; accepted: with a PROMPT")
    with reserved_stdout() as stdout:
        from expertly import api
        from expertly.cli.chat import Chat, ChatSampling, tokens_of

        def context(tokenizer: Any) -> int:
            """Tokens of the one answer and what it answers."""
            asked = [{"role": "user", "content": prompt or ""}]
            num_prompt = 0 if tokenizer is None else len(tokens_of(tokenizer, asked, is_raw=args.raw))
            return num_prompt + int(args.max_new_tokens)

        model, tokenizer = load_model(args, context=None if prompt is None else context)
        try:
            if tokenizer is None:
                raise ConfigError(f"model={args.model!r}: has no tokenizer, so there is no text to answer")
            if args.memory == "auto" or args.total_memory is not None:
                message(f"expertly: {api.stats(model).memory_reason}")
            sampling = ChatSampling(args.max_new_tokens, args.temperature, args.top_p, args.seed)
            conversation = Chat(model, tokenizer, sampling, is_raw=args.raw)
            if conversation.is_raw and not args.raw:
                message("expertly: the model has no chat template: it continues the text")
            if prompt is None:
                _chat(conversation, model, stdout)
            else:
                _answer_once(conversation, model, prompt, args, stdout)
        finally:
            api.unload(model)
    return 0


def _read_prompt(args: argparse.Namespace) -> str | None:
    """None: chat."""
    prompt: str | None = args.prompt
    if prompt is None and sys.stdin.isatty():
        return None
    try:
        prompt = sys.stdin.read() if prompt in (None, "-") else prompt
        assert prompt is not None
        prompt.encode()  # bytes of the command line that are no UTF-8 came through as lone surrogates
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise ConfigError(f"prompt: must be UTF-8 ({error.reason})") from None
    return prompt


def _answer_once(conversation: Chat, model: Any, prompt: str, args: argparse.Namespace, out: TextIO) -> None:
    answer = conversation.answer(prompt, _nothing if args.json else lambda text: _write(out, text))
    if args.json:
        print_json({**asdict(answer), "model": args.model or "demo", "prompt": prompt, **_measures(model)}, out)
    else:
        _write(out, f"\n\n{answer.line()}\n[{_budget(model)}]\n")


def _chat(conversation: Chat, model: Any, out: TextIO) -> None:
    """Until the input ends."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - what `input` edits lines with
    message(f"expertly: {_budget(model)}. /help says what else you can type; Ctrl-C stops an answer, Ctrl-D ends")
    while True:
        try:
            with contextlib.redirect_stdout(out):
                text = input("> ").strip()
        except EOFError:
            _write(out, "\n")
            return
        except KeyboardInterrupt:  # of a line that was being written
            _write(out, "\n")
            continue
        if text == "/quit":
            return
        try:
            if text.startswith("/"):
                _write(out, _command(conversation, model, text) + "\n")
            elif text:
                answer = conversation.answer(text, lambda piece: _write(out, piece))
                _write(out, f"\n{answer.line()}\n")
        except ConfigError as error:
            message(f"expertly: {error}")


def _command(conversation: Chat, model: Any, text: str) -> str:
    """What there is to say to a line that begins with a slash."""
    name, _, rest = text.partition(" ")
    rest = rest.strip()
    if name == "/system":
        conversation.instruct(rest)
        return "[a new conversation]"
    if name == "/clear":
        conversation.clear()
        return "[a new conversation]"
    if name == "/stats":
        return _stats(model)
    if name == "/save" and rest:
        conversation.save(Path(rest))
        return f"[{len(conversation.messages)} messages in {rest}]"
    width = max(map(len, COMMANDS))
    return "\n".join(f"  {name:{width}}  {what}" for name, what in COMMANDS.items())


def _stats(model: Any) -> str:
    from expertly import api

    phases = api.stats(model).as_dict()["phases"]
    rows = [
        (name, *(str(one[key]) for key in ("hits", "partial_hits", "misses")), format_share(one["hit_rate"]))
        for name, one in phases.items()
    ]
    return table(("experts", "hits", "partial", "misses", "hit rate"), rows)


def _measures(model: Any) -> dict[str, Any]:
    from expertly import api

    stats = api.stats(model).as_dict()
    return {key: stats[key] for key in ("system", "memory_bytes", "expert_bytes", "bytes_loaded", "phases")}


def _budget(model: Any) -> str:
    """What of the experts is in memory."""
    stats = _measures(model)
    share = format_share(stats["memory_bytes"] / stats["expert_bytes"])
    return (
        f"{format_nbytes(stats['memory_bytes'])} = {share} of {format_nbytes(stats['expert_bytes'])} of experts in "
        f"memory, system {stats['system']}"
    )


def _write(out: TextIO, text: str) -> None:
    out.write(text)
    out.flush()


def _nothing(text: str) -> None:
    """Where the answer is written when it is whole."""
