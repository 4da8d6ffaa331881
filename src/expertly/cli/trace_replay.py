"""`expertly lab trace replay`: feed an engine's recorded observations to a new control plane, compare its decisions.

Exit code 2 where a decision comes out otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from expertly.cli.output import print_json
from expertly.core.errors import TraceError
from expertly.options import REQUIRED, argument, json_flag, option


@dataclass(frozen=True, kw_only=True)
class TraceReplayOptions:
    file: Path = argument(
        REQUIRED, "written by `expertly lab trace record --decisions FILE`", metavar="FILE", type=Path
    )
    allow_imports: bool = option(
        False, "import the modules that the file names parts of its system by (MODULE.NAME), which runs their code"
    )
    json: bool = json_flag()


def run(args: TraceReplayOptions) -> int:
    from expertly.scheduler.decisions import replay_file

    path: Path = args.file
    header, replayed = replay_file(path, may_import=args.allow_imports)
    if replayed.difference is not None:
        line, recorded, now = replayed.difference
        raise TraceError(f"{path}, line {line}: recorded {recorded:.200}, replayed {now:.200}")
    num_iterations = replayed.num_layers // len(header["layers"])
    result = {
        "path": str(path),
        "system": header["system"],
        "segments": header["segments"],
        "iterations": num_iterations,
        "layers": replayed.num_layers,
        "calls": replayed.num_calls,
        "bytes": replayed.nbytes,
        "identical": True,
    }
    if args.json:
        print_json(result)
        return 0
    what = f"{num_iterations} iterations, {replayed.num_layers} layers, {replayed.num_calls} calls"
    print(f"system {header['system']}, P = {header['segments']}: {what}: all decisions identical")
    return 0
