"""The server as a deployment of Ray Serve: `serve run expertly.serve.ray_app:app memory=25%`; see docs/deploy.md."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, fields
from typing import Any

from ray import serve

from expertly.core.errors import ConfigError
from expertly.options import OptionInfo, option
from expertly.serve.settings import Access, ServeOptions


@dataclass(frozen=True, kw_only=True)
class RayOptions(ServeOptions):
    """The options of `app`; each replica reads files on its own machine."""

    replicas: int = option(2, "servers", metavar="N", least=1)
    no_key: bool = option(False, "requests for localhost are answered without a key, and no others")
    num_cpus: float = option(1.0, "that Ray counts a replica as", metavar="N")
    num_gpus: float = option(0.0, "that Ray counts a replica as", metavar="N")


class Replica:
    """One server: loads the model, and answers the requests that Ray's proxies pass on."""

    def __init__(self, options: RayOptions) -> None:
        self._options = options
        self._server: Any = None  # an Assembled

    async def __serve_build_asgi_app__(self) -> Any:
        """Called once, before there are requests. Imports torch only here."""
        from expertly.serve.server import open_server

        self._server = server = await asyncio.to_thread(open_server, self._options, Access.of(self._options))
        server.start()
        return server.app

    async def check_health(self) -> None:
        """See Ray Serve: a replica that raises is replaced."""
        if self._server is not None and self._server.service.scheduler.problem is not None:
            raise RuntimeError(self._server.service.scheduler.problem)

    async def __del__(self) -> None:
        """Runs when Ray has waited for running requests: writes what was learned."""
        if self._server is not None:
            from expertly import api

            await asyncio.to_thread(self._server.close)
            await asyncio.to_thread(api.unload, self._server.model)


def app(told: dict[str, Any]) -> Any:
    """The application, for `serve run` and Ray's config files, which give strings. Raises ConfigError."""
    known: dict[str, OptionInfo] = {one.name: one.metadata["option"] for one in fields(RayOptions)}
    flags = {"true": True, "false": False}
    values: dict[str, Any] = {}
    for name, value in told.items():
        if name not in known:
            raise ConfigError(f"{name}={value!r}: there is no such option; accepted: {', '.join(known)}")
        try:
            values[name] = known[name].parse(str(value)) if known[name].type is not bool else flags[str(value).lower()]
        except (KeyError, ValueError) as error:
            accepted = error if isinstance(error, ValueError) else "true or false"
            raise ConfigError(f"{name}={value!r}: accepted: {accepted}") from None
    options = RayOptions(**values)
    if (options.api_key_file is None) != options.no_key:
        raise ConfigError("accepted: api_key_file, on every machine, or no_key=true: only localhost is answered then")
    return serve.deployment(
        name="expertly",
        num_replicas=options.replicas,
        max_ongoing_requests=options.max_running + options.max_queue + 64,  # what is beyond gets 429 at once
        graceful_shutdown_timeout_s=options.drain_seconds,
        ray_actor_options={"num_cpus": options.num_cpus, "num_gpus": options.num_gpus},
    )(serve.ingress()(Replica)).bind(options)
