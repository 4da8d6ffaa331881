"""What `expertly maps info` says of a file of what was learned of reuse."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from expertly.cli.output import format_nbytes, print_json, printable

if TYPE_CHECKING:
    from expertly.policies.state.reuse_file import ReuseFile


def print_reuse(path: Path, is_json: bool) -> None:
    """Raises StoreError as ReuseFile.read."""
    from expertly.policies.state.header import describe
    from expertly.policies.state.reuse_file import ReuseFile

    file = ReuseFile.read(path)
    facts = _facts_of(file)
    if is_json:
        print_json(facts)
        return
    model = printable(file.about.get("model") or file.identity[:16])
    learned = f"learned of reuse from {facts['tokens']} tokens"
    parts = [model, describe(file.shape), learned, format_nbytes(file.nbytes), str(path)]
    lines = [("identity", printable(file.identity))]
    lines += [(printable(name), printable(value)) for name, value in file.about.items() if value not in (None, "")]
    each = ", ".join(f"{name} {value:.4g}" for name, value in facts["meaning"].items())
    lines.append(("weights", f"{facts['weights']} of {facts['experts']} experts: {each}"))
    width = max(len(name) for name, _ in lines)
    print("\n".join(["[" + " | ".join(parts) + "]", *(f"{name.ljust(width)}  {value}" for name, value in lines)]))


def _facts_of(file: ReuseFile) -> dict[str, Any]:
    """For --json."""
    from expertly.policies.state.reuse_file import MEANING

    return {
        "file": str(file.path),
        "identity": file.identity,
        "about": dict(file.about),
        "num_layers": file.shape.num_layers,
        "num_experts": list(file.shape.num_experts),
        "top_k": list(file.shape.top_k),
        "experts": sum(file.shape.num_experts),
        "tokens": file.num_tokens,
        "weights": len(file.state["weights"]),
        "meaning": dict(MEANING),
        "file_bytes": file.nbytes,
    }
