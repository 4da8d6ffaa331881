"""`expertly serve`: serve a model over HTTP, as OpenAI does."""

from __future__ import annotations

import contextlib
import logging
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expertly.cli.inputs import MODEL_HELP, load_model
from expertly.cli.output import message, reserved_stdout, show
from expertly.core.errors import ConfigError
from expertly.options import ADVANCED, LoadOptions, argument, json_flag, option

if TYPE_CHECKING:
    from expertly.serve.memory import MemorySplit
    from expertly.serve.scheduler import Room
    from expertly.serve.service import About
    from expertly.serve.settings import ServerSettings

NEEDS = ("fastapi", "uvicorn", "pydantic", "prometheus_client", "jinja2")
"""What the extra `serve` brings."""


@dataclass(frozen=True, kw_only=True)
class ServeOptions(LoadOptions):
    model: str | None = argument(None, MODEL_HELP, metavar="MODEL")
    host: str = option("127.0.0.1", "others need --api-key-file", metavar="ADDRESS")
    port: int = option(8000, "0 is any that is free", metavar="N")
    api_key_file: str | None = option(None, "the keys that clients may have, one a line", metavar="FILE")
    name: str | None = option(None, "of the model, as clients ask for it (default: that of MODEL)", metavar="NAME")
    context: int | None = option(None, "most tokens of one text, prompt included (default: 4096)", least=1)
    max_running: int = option(16, "texts written at a time", least=1)
    max_queue: int = option(256, "requests that may wait", metavar="N", panel=ADVANCED)
    kv_tokens: int | None = option(
        None,
        "KV cache (default: --max-running texts, at most 32768)",
        least=1,
        panel=ADVANCED,
    )
    max_body: int = option(4 << 20, "of a request", metavar="BYTES", least=1, panel=ADVANCED)
    chat_template: str | None = option(
        None, "a Jinja template instead of the model's own", metavar="FILE", panel=ADVANCED
    )
    drain_seconds: int = option(600, "for what runs at SIGTERM", metavar="N", panel=ADVANCED)
    cors: str | None = option(
        None, "web sites whose pages may ask, parted by commas; * is any", metavar="ORIGIN", panel=ADVANCED
    )
    log_prompts: bool = option(False, "write prompts to the log", panel=ADVANCED)
    json: bool = json_flag()


def run(args: ServeOptions) -> int:
    _check_installed()
    from expertly.serve.server import ApiServer, assemble, bind
    from expertly.serve.settings import ServerSettings, check_exposure, read_keys, read_origins

    keys = read_keys(args.api_key_file)
    check_exposure(args.host, keys)
    cors = read_origins(args.cors, keys)
    template = _read_template(args.chat_template)
    settings = ServerSettings(
        name=args.name or _name_of(args.model),
        host=args.host,
        port=args.port,
        keys=keys,
        max_body_nbytes=args.max_body,
        log_prompts=args.log_prompts,
        cors=cors,
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
                show(told, args.json, lambda: _welcome(str(told["url"]), settings, assembled.about), stdout)

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


def _load(args: ServeOptions) -> tuple[Any, Any, Room, MemorySplit]:
    """The model, its tokenizer, and how the memory was divided."""
    from expertly import api
    from expertly.serve.planning import ServeWishes, plan

    planned = plan(ServeWishes(**{one.name: getattr(args, one.name) for one in fields(ServeWishes)}))
    model, tokenizer = load_model(args.model, args, memory=planned.memory, total_memory=None, context=None)
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
