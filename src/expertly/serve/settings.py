"""The options of a server, on the command line and under Ray, and who may use it."""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from expertly.core.errors import ConfigError
from expertly.options import ADVANCED, MODEL_HELP, LoadOptions, argument, checked, names, option

MIN_KEY = 16  # characters of a key; shorter keys can be guessed

_root_path = checked(lambda text: text.rstrip("/"), "a path, as /llm", lambda path: path.startswith("/"))


@dataclass(frozen=True, kw_only=True)
class ServeOptions(LoadOptions):
    model: str | None = argument(None, MODEL_HELP, metavar="MODEL")
    api_key_file: str | None = option(None, "a file of keys that clients must have one of, one a line", metavar="FILE")
    served_model_name: Sequence[str] | str | None = option(
        None,
        "the model's name for clients, or several with commas between them (default: that of MODEL)",
        metavar="NAMES",
        is_several=True,
        panel=ADVANCED,
    )
    context: int | None = option(None, "the longest text in tokens, prompt included (default: 4096)", least=1)
    max_running: int = option(16, "how many texts are written at a time", least=1)
    max_queue: int = option(256, "how many requests may wait", panel=ADVANCED)
    kv_tokens: int | None = option(
        None, "tokens of KV cache (default: for --max-running texts, at most 32768)", least=1, panel=ADVANCED
    )
    kv_disk: str | None = option(
        None, "keep the KV cache on disk, too, up to this size", metavar="SIZE", panel=ADVANCED
    )
    max_body: int = option(4 << 20, "the largest request in bytes", metavar="BYTES", least=1, panel=ADVANCED)
    chat_template: str | None = option(
        None, "a Jinja template instead of the model's own", metavar="FILE", panel=ADVANCED
    )
    root_path: str | None = option(
        None, "the path under which a proxy shows this server, as /llm", metavar="PATH", type=_root_path, panel=ADVANCED
    )
    drain_seconds: int = option(600, "how long running requests may take to end after SIGTERM", panel=ADVANCED)

    @property
    def served_names(self) -> list[str]:
        """Those that were stated; else a hub id, or the last part of a folder's path. Raises ConfigError."""
        if self.served_model_name:
            several = self.served_model_name
            return names("served_model_name", several if isinstance(several, str) else ",".join(several))
        path = Path(self.model or "demo")
        return [path.resolve().name if self.model and path.exists() else str(self.model or "demo")]

    def template(self) -> str | None:
        """The text of `chat_template`. Raises ConfigError."""
        return None if self.chat_template is None else _read("chat_template", self.chat_template)


def read_keys(path: str | None, host: str) -> tuple[str, ...]:
    """The keys that clients of a server on `host` must have one of; none where everybody on this machine may use it.
    In the file: one key a line; empty lines and lines that begin with # are skipped. Raises ConfigError.
    """
    if path is None:
        if not is_loopback(host):
            accepted = "accepted with --api-key-file FILE, or 127.0.0.1"
            raise ConfigError(f"host={host!r}: others could reach the server without a key; {accepted}")
        return ()
    lines = _read("api_key_file", path).splitlines()
    keys = tuple(line.strip() for line in lines if line.strip() and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"api_key_file={path!r}: holds no key; accepted: one key a line")
    for number, key in enumerate(keys, 1):
        if len(key) < MIN_KEY or not key.isascii() or not key.isprintable() or " " in key:
            accepted = f"must be {MIN_KEY} or more letters, digits and signs"
            raise ConfigError(f"api_key_file={path!r}: key {number}: {accepted}")
    return keys


def is_key(shown: str, keys: Sequence[str]) -> bool:
    """Whether it is one of the keys, in a time that does not depend on them: each is compared in full."""
    return sum(hmac.compare_digest(shown.encode("utf-8", "surrogateescape"), key.encode()) for key in keys) > 0


def is_loopback(host: str) -> bool:
    """Whether a host name or an address, in brackets or not, is this machine's own."""
    if host.lower().removesuffix(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host[1:-1] if host.startswith("[") and host.endswith("]") else host).is_loopback
    except ValueError:
        return False


_HOST = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9.-]{1,255})(?::([0-9]{1,5}))?")


def host_of(header: str) -> str | None:
    """The host of a Host header, host[:port]; None where it is anything else."""
    match = _HOST.fullmatch(header)
    if match is None or int(match[2] or 0) > 65535:
        return None
    return match[1]


def _read(option_name: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option_name}={path!r}: cannot be read: {error}") from None
