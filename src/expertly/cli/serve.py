"""`expertly serve`: serve a model over HTTP, as OpenAI does."""

from __future__ import annotations

import contextlib
import logging
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from expertly.cli.loading import say_system
from expertly.cli.output import message, progress_bar, reserved_stdout, show
from expertly.engine.process import give_back_code
from expertly.options import json_flag, option
from expertly.serve.settings import Access, ServeOptions

if TYPE_CHECKING:
    from expertly.serve.service import About


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

    access = Access.of(args, args.host)
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("expertly.serve").setLevel(logging.INFO)
    with contextlib.closing(bind(args.host, args.port)) as listener, reserved_stdout() as stdout:
        with progress_bar() as progress:
            assembled = open_server(args, access, progress)
        try:
            say_system(assembled.model)
            message(f"expertly: {api.stats(assembled.model).memory_reason}")

            def announce() -> None:
                port = listener.getsockname()[1]
                host = f"[{args.host}]" if ":" in args.host else args.host
                about = assembled.service.about
                told = {"url": f"http://{host}:{port}", "model": about.as_dict(), "memory": about.memory}
                show(told, args.json, lambda: _welcome(str(told["url"]), len(access.keys), about), stdout)

            ApiServer(assembled, args.drain_seconds, announce).run(sockets=[listener])
        finally:
            api.unload(assembled.model)
    return 0


def _welcome(url: str, num_keys: int, about: About) -> str:
    how = about.batching if about.batching_reason is None else f"{about.batching}: {about.batching_reason}"
    keys = f"{num_keys} keys" if num_keys else "no key asked for"
    return (
        f"expertly: serving {about.name} on {url} ({url}/v1 for clients, {keys})\n"
        f"expertly: requests run {how} | context {about.context} | chat template: {about.chat_template}"
    )
