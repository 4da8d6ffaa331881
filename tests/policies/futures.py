"""Futures for policies that need one; they are the conformance suite's (expertly.testing)."""

from __future__ import annotations

from expertly.testing.made_up import KNOWN, AnyFuture, ListFuture

__all__ = ["KNOWN", "AnyFuture", "ListFuture"]
