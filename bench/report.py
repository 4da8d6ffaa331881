"""How every benchmark ends: a table for people, then one line of JSON with commit, versions, machine and settings."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from contextlib import suppress
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def print_report(name: str, rows: list[dict[str, Any]], settings: dict[str, Any], out: str | None = None) -> None:
    """Print `rows`; the JSON line is also written to `out` where given, else to `$EXPERTLY_BENCH_OUT/<name>.json`."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[_cell(row.get(column)) for column in columns] for row in rows]
    widths = [max(len(c[i]) for c in [columns, *cells]) for i in range(len(columns))]
    for line in [columns, *cells]:
        print("  ".join(value.rjust(width) for value, width in zip(line, widths, strict=True)))
    report = {
        "benchmark": name,
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": _commit(),
        "versions": _versions(),
        "machine": _machine(),
        "settings": settings,
        "results": rows,
    }
    folder = os.environ.get("EXPERTLY_BENCH_OUT")
    target = Path(out) if out else Path(folder) / f"{name}.json" if folder else None
    if target is not None:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 1 << 20:
        return f"{value / (1 << 20):.1f} Mi"
    return str(value)


def _commit() -> str | None:
    git = ["git", "-C", str(Path(__file__).parent.parent)]
    try:
        commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        dirty = subprocess.run([*git, "status", "--porcelain", "src"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit.stdout.strip() + ("+changes" if dirty.stdout.strip() else "")


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("expertly", "torch", "transformers", "numpy", "accelerate"):
        module = sys.modules.get(name)  # expertly may run from a bare checkout
        with suppress(PackageNotFoundError):
            found[name] = version(name) if module is None else str(module.__version__)
    return found


def _machine() -> dict[str, Any]:
    cpu = platform.processor()
    memory = 0
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                cpu = line.split(":", 1)[1].strip()
                break
        memory = int(Path("/proc/meminfo").read_text().split()[1]) << 10
    except OSError:
        pass
    return {"cpu": cpu, "cores": os.cpu_count(), "memory_bytes": memory, "load_1m": round(os.getloadavg()[0], 2)}
