"""What `expertly maps info` says of a file of what was learned of reuse."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from expertly.cli.output import format_nbytes, print_json, printable

if TYPE_CHECKING:
    from expertly.policies.eviction.reuse import ReuseModel
    from expertly.policies.learned import LearnedFile


def print_reuse(path: Path, is_json: bool) -> None:
    """Raises StoreError as read_learned."""
    from expertly.policies.eviction.reuse import ReuseModel
    from expertly.policies.learned import read_learned

    file = read_learned(path, ReuseModel)
    facts = _facts_of(file)
    if is_json:
        print_json(facts)
        return
    model = printable(file.header.about.get("model") or file.header.identity[:16])
    learned = f"learned of reuse from {facts['tokens']} tokens"
    parts = [model, str(file.header.shape), learned, format_nbytes(file.nbytes), str(path)]
    lines = [("identity", printable(file.header.identity))]
    lines += [
        (printable(name), printable(value)) for name, value in file.header.about.items() if value not in (None, "")
    ]
    each = ", ".join(f"{name} {value:.4g}" for name, value in facts["meaning"].items())
    lines.append(("weights", f"{facts['weights']} of {facts['experts']} experts: {each}"))
    width = max(len(name) for name, _ in lines)
    print("\n".join(["[" + " | ".join(parts) + "]", *(f"{name.ljust(width)}  {value}" for name, value in lines)]))


def _facts_of(file: LearnedFile[ReuseModel]) -> dict[str, Any]:
    """For --json."""
    from expertly.policies.eviction.reuse import MEANING, num_weights

    return {
        "file": str(file.path),
        "identity": file.header.identity,
        "about": dict(file.header.about),
        "num_layers": file.header.shape.num_layers,
        "num_experts": list(file.header.shape.num_experts),
        "top_k": list(file.header.shape.top_k),
        "experts": sum(file.header.shape.num_experts),
        "tokens": file.learned.num_learned,
        "weights": num_weights(file.header.shape.num_experts),
        "meaning": dict(MEANING),
        "file_bytes": file.nbytes,
    }
