"""Writes the golden files: what the present code counts, for `test_golden*.py` here and of expertly to compare with.

    python -m lab.tests.golden.record                        all, into this folder
    python -m lab.tests.golden.record --out /tmp/golden      elsewhere, to look at what differs
    python -m lab.tests.golden.record --only simulator-demo  one file (also: simulator-routing, engine)
    python -m lab.tests.golden.record --system static        of this preset alone; every other number stays
    python -m lab.tests.golden.record --make-trace           first record the demo trace anew (its cases change, too)

Record anew only where a change of these numbers is meant. It uses interfaces that users have: the command line, `load`,
`stats` and `unload`; what is not such an interface is in `make_transfers_instant` of `engine.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from expertly.scheduler.systems import SYSTEMS
from lab.tests.golden import simulator
from lab.tests.golden.simulator import FOLDER, REPOSITORY
from tests.golden import engine
from tests.golden.cases import FOLDER as OF_PRODUCT
from tests.golden.cases import SEGMENTS, Case, all_systems, preset_of, read_cases, run_command, write_cases

PROMPTS = (
    "The old man looked at the sea and said to his",
    "def largest(numbers):\n    return",
    "Anna has 12 apples and gives 5 of them",
    "Once upon a time there was a small village in",
)
NUM_NEW_TOKENS = 32
MAX_DISTANCE = 1
"""Layers that a preset's lookahead looks ahead; what the recording knows beyond takes half of its size."""


def record_simulator(replay_in: Callable[[Path], simulator.Replay], systems: Sequence[str]) -> dict[str, Case]:
    with tempfile.TemporaryDirectory() as folder:
        replay = replay_in(Path(folder))
        cases: dict[str, Case] = {}
        for segments in SEGMENTS:
            cases |= simulator.simulate(replay, systems, segments)
        return cases


def make_trace(path: Path) -> None:
    """Record the demo model with all that predictors look at, keep the nearest lookahead, and pack it."""
    from safetensors.numpy import load_file, save_file

    with tempfile.TemporaryDirectory() as temporary:
        prompts, trace = Path(temporary) / "prompts.jsonl", Path(temporary) / "demo-trace"
        prompts.write_text("".join(json.dumps({"prompt": one, "category": "text"}) + "\n" for one in PROMPTS))
        options = ["--full", "--memory", "100%", "--system", "lru", "--max-new-tokens", str(NUM_NEW_TOKENS)]
        status, printed = run_command(
            "lab", "trace", "record", "--prompts", str(prompts), "--out", str(trace), *options
        )
        assert status == 0, printed
        (shard,) = trace.glob("*.safetensors")
        columns = load_file(shard)
        columns["lookahead"] = columns["lookahead"][:, :, :MAX_DISTANCE].copy()  # [T, L, D, E]
        save_file(columns, shard)
        manifest = json.loads((trace / "manifest.json").read_text())
        manifest["fields"]["lookahead"]["shape"][1] = MAX_DISTANCE
        manifest["shards"][0]["nbytes"] = shard.stat().st_size
        manifest |= {"created": "", "command": "expertly lab trace record --full"}
        (trace / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
        with tarfile.open(path, "w:xz", preset=9) as archive:
            archive.add(trace, "demo-trace", filter=_nobodys)


def _nobodys(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.mtime = member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def parts(name: str, cases: dict[str, Case]) -> dict[Path, dict[str, Case]]:
    """The cases by the folder of their file: the engine's of presets that ship with expertly lie with its tests."""
    if name != "engine":
        return {FOLDER: cases}
    ships = {case: values for case, values in cases.items() if preset_of(case) in SYSTEMS.built_in}
    return {OF_PRODUCT: ships, FOLDER: {case: values for case, values in cases.items() if case not in ships}}


def recorded(name: str) -> dict[str, Case]:
    return {case: values for folder in parts(name, {}) for case, values in read_cases(f"{name}.json", folder).items()}


RECORDERS: dict[str, Callable[[Sequence[str]], dict[str, Case]]] = {
    "simulator-demo": partial(record_simulator, simulator.demo_replay),
    "simulator-routing": partial(record_simulator, simulator.routing_replay),
    "engine": engine.record,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=REPOSITORY, help="folder with `tests` and `lab/tests`")
    parser.add_argument("--only", choices=RECORDERS, action="append", help="one file of them")
    parser.add_argument("--system", action="append", help="a preset whose cases are recorded anew, and no others")
    parser.add_argument("--make-trace", action="store_true", help="record the demo trace anew")
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if args.make_trace:
        make_trace(simulator.DEMO_TRACE)
    for name in args.only or RECORDERS:
        cases = RECORDERS[name](args.system or all_systems())
        if args.system:
            cases = {**recorded(name), **cases}
        for folder, part in parts(name, cases).items():
            to = args.out / folder.relative_to(REPOSITORY)
            to.mkdir(parents=True, exist_ok=True)
            write_cases(f"{name}.json", part, to)
        print(f"{name}.json: {len(cases)} cases")


if __name__ == "__main__":
    main()
