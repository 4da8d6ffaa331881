"""This tree beside another commit: time of a decode token and of a prompt, in turns, in one run.

    python bench/beside.py COMMIT [--experts-gib 0,1] [--systems lru,expertly-ahead] [--memory 25%] [--rounds 9]

Each tree has a process of its own, with its own compiled code, cache folder and Python paths; the other commit's files
are unpacked into a temporary folder, and what it imports must be installed. They read the same prompts alternately, and
what this tree goes on with: a row is the median of the ratios of rounds, this tree's time / the other's. Below 1: this
tree is faster. 0 GiB is the demo model itself.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import ROOT, inflated_model, options, print_report

PROMPT_TOKENS, NEW_TOKENS = 128, 48


class Tree:
    """A process that runs one tree's code."""

    def __init__(self, source: Path, work: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(source / "src"), "EXPERTLY_CACHE": str(work)}
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--answer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=work,
        )

    def ask(self, **asked: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("a process of a tree has ended; its error is above")
        return json.loads(line)

    def close(self) -> None:
        self._process.communicate()


def answer() -> None:
    """In a tree's process: load a model, or time one round of it."""
    import torch

    import expertly
    from expertly.engine.process import keep_off_trapped_instructions
    from expertly.model.hooks import CACHE
    from expertly.options import LOAD_OPTIONS

    keep_off_trapped_instructions()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model: Any = None
    for line in sys.stdin:
        asked = json.loads(line)
        if "source" in asked:
            if model is not None:
                expertly.unload(model)
            options = {name: asked[name] for name in ("system", "memory")}
            if "learned" in LOAD_OPTIONS:  # of a commit that kept what was learned for the next run
                options["learned"] = "off"
            model, _ = expertly.load(asked["source"], device="cpu", **options)
            print(json.dumps({"from": expertly.__file__}), flush=True)
            continue
        generator = torch.Generator().manual_seed(asked["seed"])
        prompt = torch.randint(4, 4000, (1, PROMPT_TOKENS), generator=generator)
        text, times = list(asked["text"]), []
        with torch.no_grad():
            begin = time.perf_counter()
            output = model(prompt, use_cache=True)
            prompt_s = time.perf_counter() - begin
            cache = getattr(output, CACHE)
            for number in range(NEW_TOKENS):
                if number == len(text):
                    text.append(int(output.logits[0, -1].argmax()))
                token = torch.tensor([[text[number]]])
                begin = time.perf_counter()
                output = model(token, use_cache=True, **{CACHE: cache})
                times.append(time.perf_counter() - begin)
        print(json.dumps({"prompt_s": prompt_s, "token_s": statistics.mean(times), "text": text}), flush=True)


def main() -> None:
    args = options(__doc__, "commit", experts_gib="0,1", systems="lru,expertly-ahead", memory="25%", rounds=9, out=None)
    rows = []
    with tempfile.TemporaryDirectory(prefix="expertly-beside-") as scratch:
        other = Path(scratch, "other")
        other.mkdir()
        archive = subprocess.run(["git", "archive", args.commit], cwd=ROOT, capture_output=True, check=True).stdout
        subprocess.run(["tar", "-x", "-C", other], input=archive, check=True)
        setup = "from setuptools import setup; setup()"
        build = [sys.executable, "-c", setup, "-q", "build_ext", "--inplace"]
        subprocess.run(build, cwd=other, check=True, stdout=subprocess.DEVNULL)
        trees = []
        for source in (ROOT, other):
            work = Path(scratch, f"work-{len(trees)}")
            work.mkdir()
            trees.append(Tree(source, work))
        for gib in args.experts_gib.split(","):
            folder = inflated_model(float(gib)) if float(gib) else ROOT / "src/expertly/data/demo"
            for system in args.systems.split(","):
                for tree, source in zip(trees, (ROOT, other), strict=True):
                    place = tree.ask(source=str(folder), system=system, memory=args.memory)["from"]
                    assert Path(place).is_relative_to(source), f"{place} is not in {source}"
                # before anything is timed: whoever has just run a text has its experts
                texts = [trees[0].ask(seed=number, text=[])["text"] for number in range(args.rounds + 1)]
                rounds: list[list[dict[str, Any]]] = []
                for number, text in enumerate(texts):  # the first warms up
                    order = trees if number % 2 else trees[::-1]
                    timed = {tree: tree.ask(seed=number, text=text) for tree in order}
                    rounds.append([timed[tree] for tree in trees])
                ratios = {
                    key: statistics.median(here[key] / there[key] for here, there in rounds[1:])
                    for key in ("token_s", "prompt_s")
                }
                token_ms = statistics.median(here["token_s"] for here, _ in rounds[1:]) * 1e3
                rows.append(
                    {"experts_gib": float(gib), "system": system, "memory": args.memory, "token_ms": token_ms}
                    | {"token_ratio": ratios["token_s"], "prompt_ratio": ratios["prompt_s"]}
                )
        for tree in trees:
            tree.close()
    print_report("beside", rows, vars(args), args.out)


if __name__ == "__main__":
    answer() if "--answer" in sys.argv else main()
