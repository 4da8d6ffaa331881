"""The server against `generate`, and many requests against one: time per output token and tokens per second.

    python bench/serve.py [--experts-gib 3] [--memory 25%] [--tokens 48] [--rounds 5] [--concurrent 2,4,8,16]
    python bench/serve.py --clients 200 [--rounds 3]
    python bench/serve.py --beside 6000 [--rounds 9]

Bounds: one served request within 1.05x of `generate`'s TPOT; many at least 0.9 of `ceiling`, and 8 on the demo model
with all experts in memory at least 2.5x one request's tokens per second.
Server and `generate` share one model in one process and take turns; the clients are in a process of their own, without
logit bias or sampling. `ceiling` is what the union of demands allows: with all experts in memory, each takes as long as
in one request's pass; else that pass, and the bytes it loads here at the rate at which one request's loads came.

`--clients`: so many at once, with prompts of 10 to 400 tokens, against the demo, and against it with transformers' own
scheduler, which reads prompts in the order of arrival. Bounds: no error, resident memory of the last round at most 2 %
above the first's, the 99th percentile of the time to first token at most 1.5x of the arrival order's least.
`--beside`: a chat of 12 tokens alone, and as soon as the last has ended, beside a prompt of so many tokens. Bound: its
median time to first token at most 3x of alone.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from common import child, inflated_model, options, print_report, run
from transformers.generation.continuous_batching.scheduler import FIFOScheduler

from expertly.data import demo_prompts
from expertly.model.turns import Turns

PROMPTS = [json.loads(line)["prompt"] for line in demo_prompts().read_text("utf-8").splitlines()]


def ask(port: int, prompt: str | list[int], num_tokens: int) -> list[float]:
    """When it was asked, and when each event of a stream came, in seconds."""
    times = [time.perf_counter()]
    body = {"model": "model", "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "stream": True}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200, response.read()
    while line := response.readline():
        if line.startswith(b"data: {"):
            times.append(time.perf_counter())
    connection.close()
    return times


def clients(arguments: dict[str, Any]) -> dict[str, float]:
    """In a process of their own: so many requests at once."""
    if "clients" in arguments:
        return burst(arguments["port"], arguments["clients"])
    if "beside" in arguments:
        return beside(arguments["port"], arguments["beside"])
    prompts = [PROMPTS[(arguments["first"] + number) % len(PROMPTS)] for number in range(arguments["concurrent"])]
    with ThreadPoolExecutor(len(prompts)) as pool:
        found = list(pool.map(lambda prompt: ask(arguments["port"], prompt, arguments["tokens"])[1:], prompts))
    begin, end = max(times[0] for times in found), min(times[-1] for times in found)
    while_all_ran = sum(sum(begin < at <= end for at in times) for times in found)
    return {
        "tpot_s": statistics.mean((times[-1] - times[0]) / (len(times) - 1) for times in found),
        "tokens_per_s": while_all_ran / (end - begin),
    }


def burst(port: int, num_clients: int) -> dict[str, float]:
    """So many clients at once: times to first token, and how many failed."""
    draw = random.Random(0)
    prompts = [draw.choices(range(4, 2000), k=draw.choice((10, 20, 40, 100, 400))) for _ in range(num_clients)]

    def first(prompt: list[int]) -> float | None:
        try:
            times = ask(port, prompt, 16)
        except (OSError, http.client.HTTPException, AssertionError):
            return None
        return times[1] - times[0] if len(times) > 1 else None

    with ThreadPoolExecutor(num_clients) as pool:
        found = list(pool.map(first, prompts))
    firsts = sorted(seconds for seconds in found if seconds is not None)
    errors = num_clients - len(firsts)
    return {"errors": errors, "ttft_p50_s": firsts[len(firsts) // 2], "ttft_p99_s": firsts[int(len(firsts) * 0.99) - 1]}


def beside(port: int, num_tokens: int) -> dict[str, float]:
    """Times to first token: of a long prompt alone, of a chat alone, and of chats beside the prompt."""
    draw = random.Random(time.time_ns())

    def chat() -> float:
        asked, first, *_ = ask(port, draw.choices(range(4, 2000), k=12), 8)
        return first - asked

    def long() -> float:
        asked, first, *_ = ask(port, draw.choices(range(4, 2000), k=num_tokens), 1)
        return first - asked

    prompt_s, alone = long(), [chat() for _ in range(9)]
    with ThreadPoolExecutor(1) as pool:
        reading, chats = pool.submit(long), []
        time.sleep(prompt_s / 20)
        while not reading.done():
            chats.append(chat())
    found = {"prompt_s": prompt_s, "prompt_beside_s": reading.result(), "chats": len(chats)}
    found |= {"alone_s": statistics.median(alone), "first_beside_s": chats[0], "beside_s": statistics.median(chats)}
    ratios = {"ratio": statistics.median(chats), "first_ratio": chats[0], "worst_ratio": max(chats)}
    return found | {name: seconds / found["alone_s"] for name, seconds in ratios.items()}


class ArrivalOrder(FIFOScheduler):  # type: ignore[misc]
    """transformers' own scheduler, in place of ours."""

    pages = None
    num_preempted = 0

    def free_share(self) -> float:
        return float(self.cache.compute_free_capacity())


class Bench:
    """One model, served and generating."""

    def __init__(
        self, folder: str | None, args: argparse.Namespace, context: int = 256, scheduler: Any = None, **loading: Any
    ) -> None:
        """`scheduler`: in place of Turns."""
        import expertly
        from expertly.model import batching
        from expertly.serve.memory import PAGE_TOKENS
        from expertly.serve.scheduler import Room
        from expertly.serve.server import ApiServer, assemble, bind
        from expertly.serve.settings import ServeOptions

        self.args = args
        self.model, self.tokenizer = expertly.load(folder, device="cpu", **loading)
        self.model.generation_config.eos_token_id = None  # as many tokens as are asked for
        room = Room(context, max(32 * 9, 2 * context // PAGE_TOKENS), 32, 1024)
        batching.Turns = scheduler or Turns  # type: ignore[misc]
        assembled = assemble(self.model, self.tokenizer, ServeOptions(served_model_name="model"), (), room)
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
        """TPOT as `expertly run` measures it, in a thread that ends: a team of torch's threads slows another down."""
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(self._generate, prompt).result()

    def _generate(self, prompt: str) -> float:
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


def many_clients(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for name, scheduler in (("arrival order", ArrivalOrder), ("expertly", None)):
        bench = Bench(None, args, 512, scheduler, system="resident")
        try:
            for number in range(args.rounds + 1):
                row = child("serve.py", {"port": bench.port, "clients": args.clients})
                pages = int(Path("/proc/self/statm").read_text().split()[1])
                rows.append(
                    {"order": name, "round": number, **row, "resident_bytes": pages * os.sysconf("SC_PAGE_SIZE")}
                )
        finally:
            bench.close()
    best = min(row["ttft_p99_s"] for row in rows if row["order"] == "arrival order" and row["round"])
    return [row | {"of_best": row["ttft_p99_s"] / best} for row in rows]


def long_prompts(args: argparse.Namespace) -> list[dict[str, Any]]:
    bench = Bench(None, args, args.beside + 512, system="resident")
    try:
        return [child("serve.py", {"port": bench.port, "beside": args.beside}) for _ in range(args.rounds + 1)][1:]
    finally:
        bench.close()


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
    args = options(
        __doc__, experts_gib=3.0, memory="25%", tokens=48, rounds=5, concurrent="2,4,8,16", clients=0, beside=0
    )
    if args.clients or args.beside:
        print_report("serve", many_clients(args) if args.clients else long_prompts(args), vars(args))
        return
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
