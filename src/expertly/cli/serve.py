"""`expertly serve`: serve a model over HTTP, as OpenAI and Anthropic do."""

from __future__ import annotations

import contextlib
import logging
import shlex
import sys
from dataclasses import dataclass
from typing import Any

from expertly.cli.output import message, progress_bar, reserved_stdout, show
from expertly.cli.run import say_system
from expertly.engine.process import give_back_code
from expertly.options import json_flag, option
from expertly.serve.settings import ServeOptions, read_keys


@dataclass(frozen=True, kw_only=True)
class ServeCommand(ServeOptions):
    host: str = option(
        "127.0.0.1", "the address to listen on; any but this machine's needs --api-key-file", metavar="ADDRESS"
    )
    port: int = option(8000, "0 takes any that is free", metavar="N")
    json: bool = json_flag()


def run(args: ServeCommand) -> int:
    give_back_code()
    from expertly import api
    from expertly.serve.server import ApiServer, bind, open_server

    keys = read_keys(args.api_key_file, args.host)
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("expertly.serve").setLevel(logging.INFO)
    with contextlib.closing(bind(args.host, args.port)) as listener, reserved_stdout() as stdout:
        with progress_bar() as progress:
            assembled = open_server(args, keys, progress)
        try:
            say_system(assembled.model)
            message(f"expertly: {api.stats(assembled.model).memory_reason}")

            def announce() -> None:
                port = listener.getsockname()[1]
                host = f"[{args.host}]" if ":" in args.host else args.host
                url, about = f"http://{host}:{port}", assembled.service.about
                facts = {"url": url, "model": about, "memory": about["expertly"]["memory"]}
                show(facts, args.json, lambda: _welcome(url, len(keys), about), stdout)

            ApiServer(assembled, args.drain_seconds, announce).run(sockets=[listener])
        finally:
            api.unload(assembled.model)
    return 0


def _welcome(url: str, num_keys: int, about: dict[str, Any]) -> str:
    facts = about["expertly"]
    how = ": ".join(filter(None, (facts["batching"], facts["batching_reason"])))
    keys, key = (f"{num_keys} keys", "KEY") if num_keys else ("no key asked for", "none")
    name, size = shlex.quote(about["id"]), facts["context"]
    of_claude = f"ANTHROPIC_MODEL={name} ANTHROPIC_DEFAULT_HAIKU_MODEL={name} CLAUDE_CODE_MAX_CONTEXT_TOKENS={size}"
    return (
        f"expertly: serving {about['id']} on {url} ({url}/v1 for clients, {keys})\n"
        f"expertly: requests run {how} | context {size} | chat template: {facts['chat_template']}\n"
        f"  export ANTHROPIC_BASE_URL={url} ANTHROPIC_AUTH_TOKEN={key} {of_claude}\n"
        f"  export OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY={key}"
    )
