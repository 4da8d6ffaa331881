"""The dashboard: one page without anything from elsewhere, and what a browser is told of it."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass
from importlib import resources


@dataclass(frozen=True, slots=True)
class Page:
    """`headers`: nothing runs but the page's own script, and it may ask nobody but the server that it came from."""

    html: str
    headers: dict[str, str]


def dashboard_page() -> Page:
    """The page as it ships."""
    html = resources.files("expertly").joinpath("data/dashboard/index.html").read_text(encoding="utf-8")
    return Page(html, {"Content-Security-Policy": _policy(html), "X-Content-Type-Options": "nosniff"})


def _policy(html: str) -> str:
    script, style = (_hash_of(html, tag) for tag in ("script", "style"))
    return (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _hash_of(html: str, tag: str) -> str:
    """Of the page's one element of that name, as a browser takes it."""
    (text,) = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
