"""Writes the golden files: what the present code counts, for `test_golden*.py` here and of expertly to compare with.

    python -m lab.tests.golden.record                        all, into this folder
    python -m lab.tests.golden.record --out /tmp/golden      elsewhere, to look at what differs
    python -m lab.tests.golden.record --only simulator-demo  one file (also: simulator-routing, engine)
    python -m lab.tests.golden.record --system static        of this preset alone; every other number stays

Record anew only where a change of these numbers is meant. It uses interfaces that users have: the command line, `load`,
`stats` and `unload`; what is not such an interface is in `make_transfers_instant` of `engine.py`.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from expertly.scheduler.systems import SYSTEMS
from lab.tests.golden import simulator
from lab.tests.golden.simulator import FOLDER, REPOSITORY
from tests.golden import engine
from tests.golden.cases import FOLDER as OF_PRODUCT
from tests.golden.cases import SEGMENTS, Case, preset_of, read_cases, write_cases


def record_simulator(replay_in: Callable[[Path], simulator.Replay], systems: Sequence[str]) -> dict[str, Case]:
    with tempfile.TemporaryDirectory() as folder:
        replay = replay_in(Path(folder))
        cases: dict[str, Case] = {}
        for segments in SEGMENTS:
            cases |= simulator.simulate(replay, systems, segments)
        return cases


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
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    for name in args.only or RECORDERS:
        cases = RECORDERS[name](args.system or list(SYSTEMS))
        if args.system:
            cases = {**recorded(name), **cases}
        for folder, part in parts(name, cases).items():
            to = args.out / folder.relative_to(REPOSITORY)
            to.mkdir(parents=True, exist_ok=True)
            write_cases(f"{name}.json", part, to)
        print(f"{name}.json: {len(cases)} cases")


if __name__ == "__main__":
    main()
