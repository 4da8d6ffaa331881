"""`expertly serve`: serve a model over HTTP, as OpenAI and Anthropic do."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import socket
import stat
import sys
from dataclasses import dataclass
from typing import Any

from expertly.cli.output import message, progress_bar, reserved_stdout, show
from expertly.cli.run import say_choices
from expertly.core.errors import ConfigError
from expertly.engine.process import give_back_code
from expertly.options import ADVANCED, json_flag, option
from expertly.serve.settings import ServeOptions, read_keys


@dataclass(frozen=True, kw_only=True)
class ServeCommand(ServeOptions):
    host: str = option(
        "127.0.0.1", "the address to listen on; any but this machine's needs --api-key-file", metavar="ADDRESS"
    )
    port: int = option(8000, "0 takes any that is free", metavar="N")
    uds: str | None = option(None, "a Unix socket instead of host and port", metavar="PATH", panel=ADVANCED)
    json: bool = json_flag()


def run(args: ServeCommand) -> int:
    give_back_code()
    from expertly import api
    from expertly.serve.server import ApiServer, bind, open_server

    keys = read_keys(args.api_key_file, args.host if args.uds is None else "localhost")
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("expertly.serve").setLevel(logging.INFO)
    with contextlib.ExitStack() as ends, reserved_stdout() as stdout:
        bound = bind(args.host, args.port) if args.uds is None else _bind_path(args.uds)
        listener = ends.enter_context(contextlib.closing(bound))
        if args.uds is not None:
            ends.callback(os.unlink, args.uds)
        with progress_bar() as progress:
            assembled = open_server(args, keys, progress)
        try:
            say_choices(assembled.model, args)
            message(f"expertly: {api.stats(assembled.model).memory_reason}")

            def announce() -> None:
                host, about = f"[{args.host}]" if ":" in args.host else args.host, assembled.service.about
                url = f"http://{host}:{listener.getsockname()[1]}" if args.uds is None else f"unix:{args.uds}"
                facts = {"url": url, "model": about, "memory": about["expertly"]["memory"]}
                show(facts, args.json, lambda: _welcome(url, len(keys), about), stdout)

            ApiServer(assembled, args.drain_seconds, announce).run(sockets=[listener])
        finally:
            api.unload(assembled.model)
    return 0


def _bind_path(path: str) -> socket.socket:
    """Bind a Unix socket, for those who may write to it. One that a server left behind is replaced."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        if os.path.lexists(path):
            with socket.socket(socket.AF_UNIX) as client, contextlib.suppress(ConnectionRefusedError):
                client.connect(path)
                raise OSError("another server does; accepted: a path that is free")
            if not stat.S_ISSOCK(os.lstat(path).st_mode):
                raise OSError("it is no socket; accepted: a path that is free")
            os.unlink(path)
        listener.bind(path)
        listener.listen()  # else another that starts while the model is loaded would take the path
    except OSError as error:
        raise ConfigError(f"uds={path!r}: cannot listen there: {error}") from None
    return listener


def _welcome(url: str, num_keys: int, about: dict[str, Any]) -> str:
    facts = about["expertly"]
    how = ": ".join(filter(None, (facts["batching"], facts["batching_reason"])))
    keys, key = (f"{num_keys} keys", "KEY") if num_keys else ("no key asked for", "none")
    name, size = shlex.quote(about["id"]), facts["context"]
    lines = [
        f"expertly: serving {about['id']} on {url} ({url}/v1 for clients, {keys})",
        f"expertly: requests run {how} | context {size} | chat template: {facts['chat_template']}",
    ]
    if url.startswith("http:"):  # agents take no Unix socket
        models = f"ANTHROPIC_MODEL={name} ANTHROPIC_DEFAULT_HAIKU_MODEL={name} CLAUDE_CODE_MAX_CONTEXT_TOKENS={size}"
        lines.append(f"  export ANTHROPIC_BASE_URL={url} ANTHROPIC_AUTH_TOKEN={key} {models}")
        lines.append(f"  export OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY={key}")
    return "\n".join(lines)
