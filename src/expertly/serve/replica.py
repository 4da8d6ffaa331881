"""A replica's model and server, made of what an application was told: the part of `ray_app` that needs torch."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expertly import api
from expertly.core.errors import ConfigError
from expertly.engine.learned import LearnedExchange
from expertly.serve.fleet_metrics import of_others
from expertly.serve.planning import ServeWishes, plan
from expertly.serve.server import Assembled, assemble
from expertly.serve.settings import ServerSettings, read_keys

if TYPE_CHECKING:
    from expertly.serve.ray_app import Options

log = logging.getLogger("expertly.serve")

_TOLD = {"system", "segments", "dtype", "device", "host_memory", "codec", "learned", "predict", "predictor"}


@dataclass(frozen=True)
class Opened:
    """`identity`: the model's. `sharing`: None where its system learns nothing, or keeps it nowhere."""

    model: Any
    server: Assembled
    identity: str
    sharing: LearnedExchange | None

    def metrics(self) -> str:
        """As Prometheus reads them."""
        own = self.server.view.metrics().decode()
        return own if self.sharing is None else own + of_others(self.sharing.num_taken)

    def close(self) -> None:
        """What was learned is written, too."""
        self.server.close()
        api.unload(self.model)


def open_server(options: Options) -> Opened:
    """As `expertly serve` does it. Raises ExpertlyError subclasses."""
    settings = ServerSettings(
        name=options.name or _name_of(options.model),
        keys=read_keys(options.api_key_file),
        max_body_nbytes=options.max_body,
        log_prompts=options.log_prompts,
        drain_s=options.drain_seconds,
    )
    template = None if options.chat_template is None else _read(options.chat_template)
    planned = plan(
        ServeWishes(
            model=options.model,
            dtype=options.dtype,
            device=options.device,
            devices=None,
            system=options.system,
            memory=options.memory,
            total_memory=options.total_memory,
            context=options.context,
            max_running=options.max_running,
            max_queue=options.max_queue,
            kv_tokens=options.kv_tokens,
            codec=options.codec,
        )
    )
    told = options.model_dump(include=_TOLD)
    model, tokenizer = api.load(options.model, memory=planned.memory, plan=options.plan, **told)
    split = replace(planned.split, experts=api.stats(model).as_dict()["memory_bytes"])
    log.info("%s", split.sentence())
    server = assemble(model, tokenizer, settings, planned.room, split, template)
    handle = api.handle(model)
    prefetching = handle.engine.prefetching
    sharing = None if prefetching is None else prefetching.share(options.share_every_s)
    return Opened(model, server, handle.store.manifest.identity, sharing)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template={path!r}: cannot be read: {error}") from None


def _name_of(model: str | None) -> str:
    """As `expertly serve` calls it."""
    if model is None:
        return "demo"
    path = Path(model)
    return path.resolve().name if path.exists() else model
