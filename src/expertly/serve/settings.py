"""What a server is told when it starts."""

from __future__ import annotations

import hmac
import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path

from expertly.core.errors import ConfigError

MIN_KEY = 16
"""Characters of a key: fewer can be guessed."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """`name`: the model's, as clients ask for it. Empty `keys`: nobody is asked for one. `cors`: web sites whose pages
    may use the server.
    """

    name: str
    host: str = "127.0.0.1"
    port: int = 8000
    keys: tuple[str, ...] = ()
    max_body_nbytes: int = 4 << 20
    log_prompts: bool = False
    drain_s: float = 600.0
    cors: tuple[str, ...] = ()

    @property
    def checks_host(self) -> bool:
        """Without a key, whoever can make a browser here send requests could use the server under another name."""
        return not self.keys


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_exposure(host: str, keys: tuple[str, ...]) -> None:
    """Raises ConfigError where others could use the server without a key."""
    if not is_loopback(host) and not keys:
        raise ConfigError(
            f"--host {host}: others could reach the server without a key; give --api-key-file FILE, or --host 127.0.0.1"
        )


def read_origins(text: str | None, keys: tuple[str, ...]) -> tuple[str, ...]:
    """Web sites, parted by commas. Raises ConfigError where one is none, or any page of the web could use the server
    without a key.
    """
    origins = tuple(origin.strip() for origin in (text or "").split(",") if origin.strip())
    for origin in origins:
        if origin == "*" and not keys:
            raise ConfigError("--cors *: any web page could use the server without a key; give --api-key-file FILE too")
        if origin != "*" and not re.fullmatch(r"https?://[^/\s*]+", origin):
            raise ConfigError(f"--cors {origin}: accepted: * or a web site, as https://example.org")
    return origins


def read_keys(path: str | None) -> tuple[str, ...]:
    """One key a line; empty lines and those that begin with # are left out. Raises ConfigError."""
    if path is None:
        return ()
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file {path}: cannot be read: {error}") from None
    keys = tuple(line.strip() for line in lines if line.strip() and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"--api-key-file {path}: holds no key; accepted: one key a line")
    for number, key in enumerate(keys, 1):
        if len(key) < MIN_KEY or not key.isascii() or not key.isprintable() or " " in key:
            raise ConfigError(
                f"--api-key-file {path}: key {number}: must be {MIN_KEY} or more letters, digits and signs"
            )
    return keys


def is_known(key: str, keys: tuple[str, ...]) -> bool:
    """In a time that says nothing of the keys: each is compared, and each in full."""
    given = key.encode("utf-8", "surrogateescape")
    found = False
    for one in keys:
        found |= hmac.compare_digest(given, one.encode())
    return found
