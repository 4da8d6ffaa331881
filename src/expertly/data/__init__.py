"""The demo model and what ships with it, as package data."""

from __future__ import annotations

from pathlib import Path

from expertly.core.errors import ConfigError


def demo_predictor() -> Path:
    """The weights of a learned predictor that ship with the demo model. An installation may lack them."""
    return Path(__file__).parent / "predictors" / "demo.safetensors"


def demo_folder() -> Path:
    """The folder of the demo model. Raises ConfigError where the installation lacks it."""
    folder = Path(__file__).parent / "demo"
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model: this installation has no demo model ({folder} lacks config.json); name a MODEL")
    return folder


def demo_prompts() -> Path:
    """Prompts for who gives none: JSON Lines, kinds of text in turn. An installation may lack them."""
    return Path(__file__).parent / "prompts.jsonl"
