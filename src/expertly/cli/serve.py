"""`expertly serve`: an OpenAI-compatible server for one model."""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expertly.cli.arguments import count, positive_int
from expertly.cli.loading import add_loading_arguments, load_model
from expertly.cli.output import add_json_flag, message, print_json, reserved_stdout
from expertly.core.errors import ConfigError
from expertly.scheduler.presets import AUTO_SYSTEM

if TYPE_CHECKING:
    from expertly.serve.memory import MemorySplit
    from expertly.serve.scheduler import Room
    from expertly.serve.service import About
    from expertly.serve.settings import ServerSettings

NEEDS = ("fastapi", "uvicorn", "pydantic", "prometheus_client", "jinja2")
"""What the extra `serve` brings."""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("serve", help="serve a model over HTTP, as OpenAI does", description=__doc__)
    add = parser.add_argument
    add_loading_arguments(parser)
    add("--total-memory", metavar="SIZE", help='for dense weights, KV cache and experts together: "6GiB" or "auto"')
    add("--host", default="127.0.0.1", metavar="ADDRESS", help="default: 127.0.0.1; others need --api-key-file")
    add("--port", type=count, default=8000, metavar="N", help="default: 8000; 0 is any that is free")
    add("--api-key-file", metavar="FILE", help="the keys that clients may have, one a line")
    add("--cors", action="append", default=[], metavar="ORIGIN", help="a web site whose pages may ask; * is any")
    add("--name", metavar="NAME", help="of the model, as clients ask for it (default: that of MODEL)")
    add("--context", type=positive_int, metavar="N", help="most tokens of one text, prompt included (default: 4096)")
    add("--max-running", type=positive_int, default=16, metavar="N", help="texts written at a time (default: 16)")
    add("--max-queue", type=count, default=256, metavar="N", help="requests that may wait (default: 256)")
    add("--kv-tokens", type=positive_int, metavar="N", help="KV cache (default: --max-running texts, at most 32768)")
    add("--max-body", type=positive_int, default=4 << 20, metavar="BYTES", help="of a request (default: 4 MiB)")
    add("--chat-template", metavar="FILE", help="a Jinja template instead of the model's own")
    add("--drain-seconds", type=count, default=600, metavar="N", help="for what runs at SIGTERM (default: 600)")
    add("--log-prompts", action="store_true", help="write prompts to the log (default: never)")
    add("--host-memory", default="auto", metavar="SIZE", help="pinned RAM for experts behind a GPU (default: auto)")
    add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    _check_installed()
    from expertly.serve.server import ApiServer, assemble, bind
    from expertly.serve.settings import ServerSettings, check_exposure, check_origins, read_keys

    keys = read_keys(args.api_key_file)
    check_exposure(args.host, keys)
    check_origins(tuple(args.cors), keys)
    template = _read_template(args.chat_template)
    settings = ServerSettings(
        name=args.name or _name_of(args.model),
        host=args.host,
        port=args.port,
        keys=keys,
        max_body_nbytes=args.max_body,
        log_prompts=args.log_prompts,
        cors=tuple(args.cors),
        drain_s=float(args.drain_seconds),
    )
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("expertly.serve").setLevel(logging.INFO)
    with contextlib.closing(bind(args.host, args.port)) as listener, reserved_stdout() as stdout:
        from expertly import api

        model, tokenizer, room, split = _load(args)
        try:
            assembled = assemble(model, tokenizer, settings, room, split, template)

            def announce() -> None:
                port = listener.getsockname()[1]
                host = f"[{args.host}]" if ":" in args.host else args.host
                told = {"url": f"http://{host}:{port}", "model": assembled.about.as_dict(), "memory": split.as_dict()}
                if args.json:
                    print_json(told, stdout)
                else:
                    stdout.write(_welcome(str(told["url"]), settings, assembled.about) + "\n")
                    stdout.flush()

            ApiServer(assembled, settings, announce).run(sockets=[listener])
        finally:
            api.unload(model)
    return 0


def _check_installed() -> None:
    from importlib.util import find_spec

    missing = [name for name in NEEDS if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)}: not installed in this Python; `pip install 'expertly[serve]'` brings it"
        )


def _load(args: argparse.Namespace) -> tuple[Any, Any, Room, MemorySplit]:
    """The model, its tokenizer, and how the memory was divided."""
    from expertly import api
    from expertly.serve.planning import ServeWishes, plan

    wishes = ServeWishes(
        model=args.model,
        dtype=args.dtype,
        device=args.device,
        devices=args.devices,
        system=args.system or AUTO_SYSTEM,
        memory=args.memory,
        total_memory=args.total_memory,
        context=args.context,
        max_running=args.max_running,
        max_queue=args.max_queue,
        kv_tokens=args.kv_tokens,
        codec=args.codec,
    )
    planned = plan(wishes)
    args.memory = planned.memory
    model, tokenizer = load_model(args, host_memory=args.host_memory)
    split = replace(planned.split, experts=api.stats(model).as_dict()["memory_bytes"])
    message(f"expertly: {split.sentence()}")
    return model, tokenizer, planned.room, split


def _welcome(url: str, settings: ServerSettings, about: About) -> str:
    """What is said when requests are taken."""
    how = about.batching if about.why is None else f"{about.batching}: {about.why}"
    keys = f"{len(settings.keys)} keys" if settings.keys else "no key asked for"
    return (
        f"expertly: serving {about.name} on {url} ({url}/v1 for clients, {keys})\n"
        f"expertly: requests run {how} | context {about.context} | chat template: {about.chat_template}"
    )


def _read_template(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template {path}: cannot be read: {error}") from None


def _name_of(model: str | None) -> str:
    """The last part of a folder, as no client needs to know where it lies; all of a hub id."""
    if model is None:
        return "demo"
    path = Path(model)
    return path.resolve().name if path.exists() else model
