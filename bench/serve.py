"""The server against `generate`, and many requests against one: time per output token and tokens per second.

    python bench/serve.py [--experts-gib 3] [--memory 25%] [--tokens 48] [--rounds 5] [--concurrent 2,4,8,16]

Bounds: one served request within 1.05x of `generate`'s TPOT; many at least 0.9 of `ceiling`, and 8 on the demo model
with all experts in memory at least 2.5x one request's tokens per second.
Server and `generate` share one model in one process and take turns; the clients are in a process of their own, without
logit bias or sampling. `ceiling` is what the union of demands allows: with all experts in memory, each takes as long as
in one request's pass; else that pass, and the bytes it loads here at the rate at which one request's loads came.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from common import child, inflated_model, options, print_report, run

from expertly.data import demo_prompts

PROMPTS = [json.loads(line)["prompt"] for line in demo_prompts().read_text("utf-8").splitlines()]


def ask(port: int, prompt: str, num_tokens: int) -> list[float]:
    """When each event of a stream came, in seconds."""
    body = {"model": "model", "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "stream": True}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    times = []
    while line := response.readline():
        if line.startswith(b"data: {"):
            times.append(time.perf_counter())
    connection.close()
    return times


def clients(arguments: dict[str, Any]) -> dict[str, float]:
    """In a process of their own: so many requests at once."""
    prompts = [PROMPTS[(arguments["first"] + number) % len(PROMPTS)] for number in range(arguments["concurrent"])]
    with ThreadPoolExecutor(len(prompts)) as pool:
        found = list(pool.map(lambda prompt: ask(arguments["port"], prompt, arguments["tokens"]), prompts))
    begin, end = max(times[0] for times in found), min(times[-1] for times in found)
    while_all_ran = sum(sum(begin < at <= end for at in times) for times in found)
    return {
        "tpot_s": statistics.mean((times[-1] - times[0]) / (len(times) - 1) for times in found),
        "tokens_per_s": while_all_ran / (end - begin),
    }


class Bench:
    """One model, served and generating."""

    def __init__(self, folder: str | None, args: argparse.Namespace, **loading: Any) -> None:
        import expertly
        from expertly.serve.memory import PAGE_TOKENS
        from expertly.serve.scheduler import Room
        from expertly.serve.server import ApiServer, assemble, bind
        from expertly.serve.settings import ServeOptions

        self.args = args
        self.model, self.tokenizer = expertly.load(folder, device="cpu", **loading)
        self.model.generation_config.eos_token_id = None  # as many tokens as are asked for
        room = Room(256, PAGE_TOKENS, 32 * 9, 32, 64)
        assembled = assemble(self.model, self.tokenizer, ServeOptions(name="model"), (), room)
        self._listener = bind("127.0.0.1", 0)
        self.port = self._listener.getsockname()[1]
        is_up = threading.Event()
        self._server = ApiServer(assembled, announce=is_up.set)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._listener]})
        self._thread.start()
        assert is_up.wait(60)

    def close(self) -> None:
        import expertly

        self._server.end()
        self._thread.join()
        self._listener.close()
        expertly.unload(self.model)

    def generate(self, prompt: str) -> float:
        """TPOT as `expertly run` measures it."""
        from expertly.model.text import TextStreamer

        streamer = TextStreamer(lambda tokens: self.tokenizer.decode(tokens), lambda text: None)
        inputs = self.tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        self.model.generate(**inputs, max_new_tokens=self.args.tokens, do_sample=False, streamer=streamer)
        times = streamer.times_ns
        return (times[-1] - times[0]) / (len(times) - 1) / 1e9

    def served(self, concurrent: int, first: int) -> dict[str, float]:
        """And what was loaded meanwhile, a forward pass."""
        before = self._counts()
        found: dict[str, float] = child(
            "serve.py", {"port": self.port, "concurrent": concurrent, "first": first, "tokens": self.args.tokens}
        )
        passes, *each = (now - was for was, now in zip(before, self._counts(), strict=True))
        return found | {name: one / passes for name, one in zip(("loaded", "stall_s", "experts"), each, strict=True)}

    def _counts(self) -> tuple[int, int, float, int]:
        import expertly

        decode = expertly.stats(self.model).as_dict()["phases"]["decode"]
        experts = decode["hits"] + decode["partial_hits"] + decode["misses"]
        return decode["iterations"], decode["bytes_loaded"], decode["stall_s"], experts


def measure(benches: dict[str, Bench], args: argparse.Namespace) -> dict[tuple[str, str], list[dict[str, float]]]:
    """By model and by how it was asked: what each round found. Models take turns within a round."""
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    for number in range(args.rounds + 1):
        for name, bench in benches.items():
            alone, one = bench.generate(PROMPTS[number]), bench.served(1, number)
            one["tpot_ratio"] = one["tpot_s"] / alone
            rows = {"generate": {"tpot_s": alone}, "1 request": one}
            for many in args.concurrent:
                together = rows[f"{many} requests"] = bench.served(many, number)
                together["gain"] = together["tokens_per_s"] / one["tokens_per_s"]
            for how, values in rows.items() if number else ():  # the first warms up
                found.setdefault((name, how), []).append(values)
    return found


def add_ceilings(found: dict[tuple[str, str], list[dict[str, float]]], name: str, resident: str, many: int) -> None:
    """To each round of `name`, by the same round of the model that has all experts in memory."""
    how = f"{many} requests"
    for one, together, whole in zip(found[name, "1 request"], found[name, how], found[resident, how], strict=True):
        if name == resident:
            together["ceiling"] = many * one["tokens_per_s"] * one["experts"] / together["experts"]
        else:
            rate = one["loaded"] / one["stall_s"] if one["stall_s"] else float("inf")
            together["ceiling"] = many / (whole["tpot_s"] + together["loaded"] / rate)
        together["of_ceiling"] = together["tokens_per_s"] / together["ceiling"]


def main() -> None:
    args = options(__doc__, experts_gib=3.0, memory="25%", tokens=48, rounds=5, concurrent="2,4,8,16")
    args.concurrent = [int(many) for many in args.concurrent.split(",")]
    folder = str(inflated_model(args.experts_gib))
    demo, resident, partly = "demo, all experts", "inflated, all experts", f"inflated, {args.memory}"
    benches = {
        demo: Bench(None, args, system="resident"),
        resident: Bench(folder, args, system="resident"),
        partly: Bench(folder, args, memory=args.memory),
    }
    try:
        found = measure(benches, args)
    finally:
        for bench in benches.values():
            bench.close()
    for many in args.concurrent:
        for name, whole in ((demo, demo), (resident, resident), (partly, resident)):
            add_ceilings(found, name, whole, many)
    rows = [
        {"model": name, "how": how, **{key: statistics.median(one[key] for one in values) for key in values[0]}}
        for (name, how), values in found.items()
    ]
    print_report("serve", rows, vars(args))


if __name__ == "__main__":
    run(main, clients)
