"""What the benchmarks share: their options, the inflated model, a memory cgroup, children that measure in a process of
their own; and how each ends: a table for people, then a line of JSON with commit, versions, machine and settings.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
GIB = 1 << 30
CLOCKS = {"wall": time.perf_counter, "cpu": time.thread_time}
PROMPT = "Once upon a time, in a small village at the foot of the mountains, there lived an old man who"


def options(doc: str | None, *required: str, **defaults: Any) -> argparse.Namespace:
    """The command line of a benchmark: texts that must be given, and each default as an option of its type; None is a
    text that may be left out, False a flag, and of a tuple one may be chosen, in place of the first.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in required:
        parser.add_argument(name)
    for name, default in defaults.items():
        kind: dict[str, Any] = {"default": default, "type": str if default is None else type(default)}
        if default is False:
            kind = {"action": "store_true"}
        elif isinstance(default, tuple):
            kind = {"default": default[0], "choices": default[default[0] is None :]}
        parser.add_argument(f"--{name.replace('_', '-')}", **kind)
    return parser.parse_args()


def run(main: Callable[[], None], measure: Callable[[dict[str, Any]], Any]) -> None:
    """A benchmark that measures in children: `main`, or in a child `measure`, whose value goes to its `child`."""
    arguments = child_arguments()
    if arguments is None:
        main()
    else:
        print(json.dumps(measure(arguments)))


def bench_folder() -> Path:
    """Where models and packages are kept from one benchmark to the next."""
    return Path(os.environ.get("EXPERTLY_BENCH_DIR", Path(tempfile.gettempdir()) / "expertly-bench"))


def inflated_model(
    gib: float,
    folder: str | None = None,
    dtype: str = "bfloat16",
    num_layers: int | None = None,
) -> Path:
    """A demo model inflated to `gib` GiB of experts, made once a folder and kept for the next benchmark. `num_layers`:
    only the first so many of its layers.
    """
    home = Path(folder) if folder else bench_folder()
    layers = "" if num_layers is None else f"-{num_layers}-layers"
    out = home / f"demo-{gib:g}gib-{dtype}{layers}-no-zeros"
    if not out.exists():
        home.mkdir(parents=True, exist_ok=True)
        tool = ROOT / "tools" / "inflate_model.py"
        command = [sys.executable, tool, out, "--experts-gib", str(gib), "--dtype", dtype]
        cut = [] if num_layers is None else ["--layers", str(num_layers)]
        subprocess.run([*command, *cut], check=True)
    return out


@contextmanager
def memory_cgroup(nbytes: int) -> Iterator[Path]:
    """A memory cgroup (version 1), removed afterwards. Raises OSError where it cannot be made."""
    folder = Path("/sys/fs/cgroup/memory") / f"expertly-bench-{uuid.uuid4().hex[:8]}"
    folder.mkdir()
    try:
        (folder / "memory.limit_in_bytes").write_text(str(nbytes))
        yield folder
    finally:
        folder.rmdir()


def child(script: str, arguments: dict[str, Any], cgroup: Path | None = None, timeout: float = 900) -> Any:
    """Run `bench/<script> --child JSON` in a process of its own, in a cgroup; what it printed last, as JSON."""

    def enter() -> None:
        if cgroup is not None:
            (cgroup / "cgroup.procs").write_text(str(os.getpid()))

    command = [sys.executable, str(ROOT / "bench" / script), "--child", json.dumps(arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, preexec_fn=enter, timeout=timeout, cwd=ROOT, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{script} {arguments}: exit {done.returncode}")
    return json.loads(done.stdout.decode().strip().splitlines()[-1])


def child_arguments() -> dict[str, Any] | None:
    """The arguments of `child`, when this process is one."""
    from expertly.engine.process import keep_off_trapped_instructions

    keep_off_trapped_instructions()
    if "--child" not in sys.argv:
        return None
    arguments: dict[str, Any] = json.loads(sys.argv[sys.argv.index("--child") + 1])
    return arguments


def play(model: Any, tokens: Sequence[int], num_prompt: int) -> dict[str, Any]:
    """Feed a request: its times, and what the experts did in its decode steps."""
    import expertly
    from expertly_lab.playing import feed

    before = expertly.stats(model).as_dict()["phases"]["decode"]
    played = feed(model, tokens, num_prompt)
    after = expertly.stats(model).as_dict()["phases"]["decode"]
    counts = ("hits", "misses", "partial_hits", "bytes_loaded", "stall_s")
    times = {"tpot_s": played.tpot_s, "ttft_s": played.ttft_s, "steps": len(played.steps_s)}
    return times | {key: after[key] - before[key] for key in counts}


def predictor_of(model: Any, folder: Path) -> Path:
    """The demo model's predictor, under the identity of the model inflated from it."""
    from expertly.api import handle
    from expertly.data import demo_predictor
    from expertly.policies.learned import read_learned, save_learned
    from expertly.policies.promoe import LearnedWeights

    file, out = read_learned(demo_predictor(), LearnedWeights), folder / "predictor.safetensors"
    save_learned(out, file.learned, handle(model).store.manifest.identity, file.about)
    return out


class Quiet:
    """Waits for moments in which this machine is as fast as it can be: others share its processors. `waited_s`: how
    long that took.
    """

    def __init__(self, seconds: float = 10.0, slower: float = 1.25, patience_s: float = 60.0) -> None:
        """`seconds`: to find its speed, at first; up to `slower` times as long for the same as it ever took is quiet.
        After `patience_s` of waiting the speed is taken for what it now is.
        """
        begin_s = time.monotonic()
        self._slower, self._patience_s, self._fastest_ns, self.waited_s = slower, patience_s, _probe_ns(), 0.0
        while time.monotonic() < begin_s + seconds:
            self._fastest_ns = min(self._fastest_ns, _probe_ns())

    def wait(self) -> None:
        begin_s = time.monotonic()
        while (now_ns := _probe_ns()) > self._slower * self._fastest_ns:
            if time.monotonic() > begin_s + self._patience_s:
                self._fastest_ns = now_ns
            time.sleep(0.02)
        self._fastest_ns = min(self._fastest_ns, now_ns)
        self.waited_s += time.monotonic() - begin_s


def _probe_ns() -> int:
    """What a fixed loop takes: the median of a few."""
    took_ns = []
    for _ in range(5):
        begin_ns = time.perf_counter_ns()
        for _ in range(20_000):
            pass
        took_ns.append(time.perf_counter_ns() - begin_ns)
    return sorted(took_ns)[len(took_ns) // 2]


def drop_page_cache(folder: Path) -> None:
    """Ask the kernel to forget the cached pages of a folder's files."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def print_report(
    name: str, rows: list[dict[str, Any]], settings: dict[str, Any], out: str | None = None
) -> dict[str, Any]:
    """Print `rows`, and what `write_report` writes, which is returned."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[_cell(row.get(column)) for column in columns] for row in rows]
    widths = [max(len(c[i]) for c in [columns, *cells]) for i in range(len(columns))]
    for line in [columns, *cells]:
        print("  ".join(value.rjust(width) for value, width in zip(line, widths, strict=True)))
    report = write_report(name, rows, settings, out)
    print(json.dumps(report))
    return report


def write_report(
    name: str, rows: list[dict[str, Any]], settings: dict[str, Any], out: str | None = None
) -> dict[str, Any]:
    """A report, which is written to `out` where given."""
    report = {
        "benchmark": name,
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit_of(ROOT),
        "versions": _versions(),
        "machine": _machine(),
        "settings": settings,
        "results": rows,
    }
    if out:
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        Path(out).write_text(json.dumps(report, indent=1) + "\n")
    return report


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 1 << 20:
        return f"{value / (1 << 20):.1f} Mi"
    return str(value)


def commit_of(checkout: Path) -> str | None:
    git = ["git", "-C", str(checkout)]
    try:
        commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        dirty = subprocess.run(
            [*git, "status", "--porcelain", "src", "bench/*.py"], capture_output=True, text=True, check=True
        )
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
    from expertly.core.resources import cpu_name

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    counts = {"cores": os.cpu_count(), "memory_bytes": memory, "load_1m": round(os.getloadavg()[0], 2)}
    return {"cpu": cpu_name(), "processor": _processor(), **counts}


def _processor() -> str:
    """Vendor, family and model, where the system's name says less than kernels depend on."""
    fields: dict[str, str] = {}
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name.strip(), value.strip())
    names = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU part")
    return ", ".join(f"{name} {fields[name]}" for name in names if name in fields) or platform.machine()
