"""What `expertly` loads on workloads that nothing was learned from: each is left out in turn.

    python bench/left_out.py [TRACE,TRACE...] [--geometry NAME,NAME...] [--groups 3] [--tokens 600] [--taught 3000]
        [--memory 25%,50%] [--system expertly] [--out FILE]

A workload is a trace, or one of `--groups` groups of its categories (in the order of their names). Beside those given
two are made up, of gpt-oss-20b's shape: popularity that drifts, and popularity that is nearly even. `expertly` begins
from nothing, from what all other workloads of its model taught, and from what made-up routing of that shape taught; the
rest begins from nothing. A geometry a trace: a shipped description, a TOML file or `-`, its own.

of best   bytes loaded, of the least of lru, lfu, lcp and fmoe
gap       (better of lru and lfu - expertly) / (better of lru and lfu - belady), in bytes loaded
The last rows are means over workloads, and the worst of them.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

from common import print_report

from expertly.cli.inputs import trace_geometry
from expertly.core.geometry import DenseShape, LayerGeometry
from expertly.lab.synth import write_workload, zipf
from expertly.policies.eviction.reuse import ReuseModel
from expertly.policies.learned import ModelShape
from expertly.scheduler.presets import get_system
from expertly.sim.hardware import Hardware
from expertly.sim.schedule import Schedule, first_rows
from expertly.sim.study import Memory, Study
from expertly.sim.training import teach
from expertly.sim.workload import RowRange
from expertly.trace.reader import Trace

PLAIN = ("lru", "lfu", "lcp", "fmoe")
BOUND = "belady"
MADE_UP = {"zipf, drifting": {"keep": 0.3, "num_phases": 3}, "zipf, nearly even": {"keep": 0.3, "exponent": 0.5}}
SHAPE = "gpt-oss-20b"


@dataclass(frozen=True)
class Workload:
    """Some requests of a trace, and the sizes of its experts."""

    name: str
    trace: Trace
    spans: list[RowRange]
    layers: tuple[LayerGeometry, ...]
    dense: DenseShape | None
    is_made_up: bool = False

    @property
    def study(self) -> Study:
        return Study(self.trace, Schedule([], self.spans), Hardware.read("rtx3090"), self.layers, self.dense)

    @property
    def shape(self) -> ModelShape:
        return ModelShape.of(self.study.geometry)


def workloads(trace: Trace, geometry: str | None, name: str, num_groups: int, seed: int) -> Iterator[Workload]:
    layers, dense, _ = trace_geometry(trace, geometry)
    assert layers is not None, f"{name}: --geometry says which sizes its experts have"
    requests = [request for request in trace.requests if request.num_rows]
    categories = sorted({request.category or "" for request in requests})
    num = min(num_groups, len(categories))
    for group in range(num):
        some = categories[group * len(categories) // num : (group + 1) * len(categories) // num]
        spans = [RowRange(one.number, one.first_row, one.num_rows) for one in requests if (one.category or "") in some]
        Random(seed).shuffle(spans)
        yield Workload(name if num == 1 else f"{name}, {some[0]} to {some[-1]}", trace, spans, layers, dense)


def made_up(folder: Path, name: str, shape: ModelShape, num_tokens: int, seed: int, **options: Any) -> Trace:
    routing = zipf(shape.num_layers, shape.max_experts, shape.max_top_k, num_tokens, seed=seed, **options)
    write_workload(folder / name, routing, model=name, seed=seed)
    return Trace.open(folder / name)


def taught(shape: ModelShape, workloads: list[Workload], num_tokens: int) -> ReuseModel | None:
    """From as many tokens of each."""
    model = ReuseModel(shape.geometry())
    for one in workloads:
        teach(model, one.trace, first_rows(one.spans, num_tokens // len(workloads)))
    return model if workloads else None


def results(all_of_them: list[Workload], folder: Path, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for one in all_of_them:
        kind = (one.shape, one.is_made_up)
        others = [other for other in all_of_them if other is not one and (other.shape, other.is_made_up) == kind]
        trace = made_up(
            folder, f"for {one.name}".replace("/", " "), one.shape, args.taught, args.seed + 9, num_phases=2
        )
        other = Workload("made up", trace, [RowRange(None, 0, trace.num_rows)], one.layers, None)
        learned = {"nothing": None, "others": taught(one.shape, others, args.taught)}
        learned["made-up routing"] = taught(one.shape, [other], args.taught)
        tested = Workload(one.name, one.trace, first_rows(one.spans, args.tokens), one.layers, one.dense)
        for memory in args.memory:
            study = tested.study
            plain = {name: study.row(get_system(name), Memory(memory))["bytes_loaded"] for name in (*PLAIN, BOUND)}
            better = min(plain["lru"], plain["lfu"])
            for source, model in learned.items():
                if model is None and source != "nothing":
                    continue
                study.reuse = model
                row = study.row(get_system(args.system), Memory(memory))
                yield {
                    "workload": one.name,
                    "memory": memory,
                    "learned from": source,
                    "tokens": row["tokens"],
                    **{f"{name}_mib": nbytes / row["tokens"] / 2**20 for name, nbytes in plain.items()},
                    "mib": row["bytes_loaded"] / row["tokens"] / 2**20,
                    "of best": row["bytes_loaded"] / min(plain[name] for name in PLAIN),
                    "gap": (better - row["bytes_loaded"]) / (better - plain[BOUND]),
                    "hit_rate": row["hit_rate"],
                }


def summary(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for key in dict.fromkeys((row["memory"], row["learned from"]) for row in rows):
        some = [row for row in rows if (row["memory"], row["learned from"]) == key]
        about = {"memory": key[0], "learned from": key[1]}
        yield about | {"workload": "mean", **{name: fmean(row[name] for row in some) for name in ("of best", "gap")}}
        worst = max(some, key=lambda row: row["of best"])
        yield about | {"workload": f"worst: {worst['workload']}", "of best": worst["of best"], "gap": worst["gap"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = lambda text: [one.strip() for one in text.split(",")]  # noqa: E731
    parser.add_argument("traces", type=names, nargs="?", default=[])
    parser.add_argument("--geometry", type=names)
    parser.add_argument("--groups", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=600, help="simulated of each workload at most")
    parser.add_argument("--taught", type=int, default=3000, help="tokens that it learns from before")
    parser.add_argument("--memory", type=names, default="25%,50%")
    parser.add_argument("--system", default="expertly")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out")
    args = parser.parse_args()
    geometries = args.geometry or ["-"] * len(args.traces)
    if len(geometries) != len(args.traces):
        parser.error(f"--geometry: {len(geometries)} for {len(args.traces)} traces; give one each, `-` for its own")
    with tempfile.TemporaryDirectory() as folder:
        found: list[Workload] = []
        for path, geometry in zip(map(Path, args.traces), geometries, strict=True):
            name = path.resolve().name
            found += workloads(Trace.open(path), None if geometry == "-" else geometry, name, args.groups, args.seed)
        shape = ModelShape((32,) * 24, (4,) * 24)
        for number, (name, options) in enumerate(MADE_UP.items(), args.seed):
            trace = made_up(Path(folder), name, shape, max(args.tokens, args.taught), number, **options)
            layers, dense, _ = trace_geometry(trace, SHAPE)
            assert layers is not None
            found.append(Workload(name, trace, [RowRange(None, 0, trace.num_rows)], layers, dense, is_made_up=True))
        rows = list(results(found, Path(folder), args))
    settings = {key: str(value) for key, value in vars(args).items() if key != "out"}
    print_report("left_out", [*rows, *summary(rows)], settings, args.out)


if __name__ == "__main__":
    main()
