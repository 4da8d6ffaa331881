"""Train the demo model that ships in `src/expertly/data/demo`.

    python tools/train_demo.py --data DIR --minutes 100
    python tools/train_demo.py --data DIR --minutes 100 --start src/expertly/data/demo      (a further sitting)

Half of the sequences are conversations (`--chat`, tools/demo_chat.py), of which only the answers count.

Runs on the CPU with one process a core that share the parameters, or on one GPU; in bfloat16 where the processor
multiplies it, with weights and optimizer in float32. The learning rate follows the share of the time (`--minutes`,
`--until`) or of the steps (`--steps`, reproducible by `--seed`) that has passed. A run that was killed goes on from its
last checkpoint when it is started again with the same `--work` folder; `--start` begins anew from a model's weights.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from demo_card import Sitting, read_sittings, write_card
from demo_chat import with_chat
from demo_data import Corpus, Sampler, prepare
from demo_moe import NUM_EXPERTS, VOCAB, RouterLoss, build_model, demo_config
from demo_optim import Rates, Slot, attach, has_fast_bfloat16, make_slots, update
from torch import Tensor
from torch import multiprocessing as mp
from transformers import PreTrainedTokenizerFast, Qwen3MoeForCausalLM

from expertly.core.resources import cpu_name

PACKAGE_DATA = Path(__file__).parent.parent / "src" / "expertly" / "data" / "demo"
LONG_FROM = 0.85
IGNORED = -100


@dataclass(frozen=True, slots=True)
class Settings:
    """What a run is made of; defaults are the command line's."""

    data: Path = Path(__file__).parent.parent.parent / "shared" / "data"
    out: Path = PACKAGE_DATA
    work: Path = Path("demo_training")
    start: Path | None = None
    """Folder of a demo model whose weights the run begins with, or None: fresh ones."""
    until_s: float | None = None
    """Wall-clock end (seconds since the epoch), or None: the run ends after `steps`."""
    steps: int = 2000
    seed: int = 0
    workers: int = 2
    rows: int = 8
    """Sequences of 256 tokens a worker and step; the last 15 % of the run uses rows / 4 of 1024 instead."""
    muon_lr: float = 0.02
    adam_lr: float = 4e-3
    weight_decay: float = 0.01
    chat: float = 0.5
    """Share of the sequences that are conversations."""
    max_chars: int = 24_000_000
    card_only: bool = False
    save_every_s: float = 600.0
    device: str = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(slots=True)
class Progress:
    step: int = 0
    tokens: int = 0
    elapsed_s: float = 0.0


def learning_rate_factor(progress: float) -> float:
    """Linear warm-up over 2 %, flat to 30 %, linear to 2 % of the peak at the end."""
    return min(1.0, (progress + 1e-3) / 0.02) * min(1.0, 0.02 + 0.98 * (1 - progress) / 0.7)


def work(rank: int, settings: Settings, slots: list[Slot], start: Progress, barrier: Any, shared: Tensor) -> None:
    """One worker's training loop; `shared` [2 + workers] holds rank 0's progress share, a stop flag and losses."""
    if settings.device == "cpu":
        torch.set_num_threads(1)
    torch.manual_seed(settings.seed)
    tokenizer, corpora = prepare(settings.data, settings.work / "tokens", settings.seed, VOCAB, settings.max_chars)
    steps_before = sum(one.steps for one in read_sittings(settings.start)) + start.step
    sampler = Sampler(corpora, settings.seed + 1_000_003 * steps_before, settings.chat)
    model = build_model(torch.device(settings.device))
    attach(model, slots, rank)
    model.train()
    router_loss = RouterLoss(model, balance=0.01, z=1e-4)
    began = time.time() - start.elapsed_s
    saved = exported = time.time()
    state, start_step = start, start.step
    while True:
        if rank == 0:
            now = time.time()
            total_s = (settings.until_s or now) - began
            done = (now - began) / total_s if settings.until_s else state.step / settings.steps
            shared[0] = done
        barrier.wait()
        done = float(shared[0])
        if done >= 1:
            if rank == 0:
                save_checkpoint(settings.work / "checkpoint.pt", slots, state)
            return
        length, rows = (256, settings.rows) if done < LONG_FROM else (1024, max(1, settings.rows // 4))
        batch, counted = (
            torch.from_numpy(part[rank * rows : (rank + 1) * rows]).to(settings.device)
            for part in sampler.batch(rows * settings.workers, length)
        )
        targets = torch.where(counted, batch, IGNORED)[:, 1:]
        for slot in slots:
            slot.grads[rank].zero_()
        with torch.autocast(settings.device, torch.bfloat16, enabled=has_fast_bfloat16(settings.device)):
            logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED)
        (loss + router_loss.take()).backward()
        shared[2 + rank].lerp_(loss.detach().cpu(), 0.1 if state.step > start_step + 5 else 1.0)
        del logits, loss
        barrier.wait()
        state.step += 1
        state.tokens += rows * length * settings.workers
        factor = learning_rate_factor(done)
        rates = Rates(settings.muon_lr * factor, settings.adam_lr * factor, settings.weight_decay)
        update(slots, rank, settings.workers, state.step, rates)
        barrier.wait()
        if rank == 0:
            now = time.time()
            state.elapsed_s = now - began
            if state.step % 10 == 0:
                _log(settings, state, done, factor, shared[2:], router_loss.load)
            if state.step == 60 or now - exported > settings.save_every_s:
                exported = now
                export(slots, tokenizer, settings.work / "model")
            if now - saved > settings.save_every_s / 2:
                saved = now
                save_checkpoint(settings.work / "checkpoint.pt", slots, state)


def _log(settings: Settings, state: Progress, done: float, factor: float, losses: Tensor, load: Tensor) -> None:
    loss = float(losses.mean())
    speed = state.tokens / state.elapsed_s
    print(
        f"step {state.step} done {done:.3f} lr x{factor:.3f} loss {loss:.3f} tokens {state.tokens} "
        f"({speed:.0f}/s) expert share min {float(load.min()):.4f} max {float(load.max()):.4f}",
        flush=True,
    )


def save_checkpoint(path: Path, slots: list[Slot], state: Progress) -> None:
    """Everything a resumed run needs, written whole or not at all."""
    tensors = {slot.name: (slot.value, slot.first, slot.second) for slot in slots}
    torch.save({"slots": tensors, "state": (state.step, state.tokens, state.elapsed_s)}, path.with_suffix(".tmp"))
    os.replace(path.with_suffix(".tmp"), path)


def load_checkpoint(path: Path, slots: list[Slot]) -> Progress:
    """Fill the slots from `path` where it exists; where the run stood."""
    if not path.exists():
        return Progress()
    saved = torch.load(path, weights_only=True, map_location="cpu")
    for slot in slots:
        value, first, second = saved["slots"][slot.name]
        slot.value.copy_(value)
        slot.first.copy_(first)
        if slot.second is not None:
            slot.second.copy_(second)
    return Progress(*saved["state"])


def export(slots: list[Slot], tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write a transformers folder in bfloat16 to `out`; files already there with other names stay."""
    model = Qwen3MoeForCausalLM(demo_config())
    model.bfloat16()
    missing, unexpected = model.load_state_dict({slot.name: slot.value for slot in slots}, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    sampling = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "_from_model_config": False}
    model.generation_config.update(**sampling)  # greedily, so small a model repeats itself
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    _amend(partial / "config.json", num_experts=NUM_EXPERTS)
    _amend(
        partial / "tokenizer_config.json",
        tokenizer_class="PreTrainedTokenizerFast",
        is_local=None,
        local_files_only=None,
    )
    out.mkdir(parents=True, exist_ok=True)
    for file in partial.iterdir():
        file.chmod(0o644)
        os.replace(file, out / file.name)
    partial.rmdir()


def _amend(file: Path, **fields: Any) -> None:
    """Set fields (None: remove) that other versions of transformers read under another name, or not at all."""
    amended = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({k: v for k, v in amended.items() if k not in fields or v is not None}, indent=2) + "\n")


def train(settings: Settings, command: str) -> None:
    """Train, export to `settings.out` and write its model card."""
    settings.work.mkdir(parents=True, exist_ok=True)
    tokenizer, corpora = prepare(settings.data, settings.work / "tokens", settings.seed, VOCAB, settings.max_chars)
    if settings.card_only:
        return describe(settings, tokenizer, corpora)
    (settings.work / "command.txt").write_text(command)
    torch.manual_seed(settings.seed)
    model = build_model(torch.device(settings.device))
    if settings.start is not None:
        check_vocabulary(settings.start, tokenizer)
        trained = Qwen3MoeForCausalLM.from_pretrained(settings.start, dtype=torch.float32)
        model.load_state_dict(trained.state_dict())
    slots = make_slots(model, settings.workers)
    state = load_checkpoint(settings.work / "checkpoint.pt", slots)
    shared = torch.zeros(2 + settings.workers).share_memory_()
    print(f"training from step {state.step} on {settings.device} with {settings.workers} workers", flush=True)
    began = time.time()
    if settings.workers == 1:
        work(0, settings, slots, state, threading.Barrier(1), shared)
    else:
        barrier = mp.get_context("spawn").Barrier(settings.workers)
        mp.start_processes(work, (settings, slots, state, barrier, shared), nprocs=settings.workers)
    print(f"trained in {time.time() - began:.0f} s; exporting", flush=True)
    export(slots, tokenizer, settings.out)
    describe(settings, tokenizer, corpora)


def check_vocabulary(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Raise SystemExit if the model in `folder` reads other tokens than this run's data is made of."""
    if with_chat(PreTrainedTokenizerFast.from_pretrained(folder)).get_vocab() != tokenizer.get_vocab():
        raise SystemExit(f"--start {folder}: its tokenizer is not the one that this data and seed give")


def describe(settings: Settings, tokenizer: PreTrainedTokenizerFast, corpora: list[Corpus]) -> None:
    """Measure the exported model and write its card; what the training cost is in the work folder."""
    command = (settings.work / "command.txt").read_text()
    saved = torch.load(settings.work / "checkpoint.pt", weights_only=True, map_location="cpu")
    step, tokens, elapsed_s = saved["state"]
    if settings.device == "cpu":
        hardware = f"{settings.workers} cores ({cpu_name()} CPU) shared with other work"
    else:
        hardware = torch.cuda.get_device_name()
    sittings = [*read_sittings(settings.start), Sitting(command, hardware, step, tokens, round(elapsed_s))]
    write_card(settings.out, tokenizer, corpora, sittings)


def parse(arguments: list[str] | None = None) -> Settings:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Settings()
    parser.add_argument("--data", type=Path, default=default.data, help="folder that holds text/*.txt.xz")
    parser.add_argument("--out", type=Path, default=default.out, help="model folder to write")
    parser.add_argument("--work", type=Path, default=default.work, help="token cache, checkpoints and early exports")
    parser.add_argument("--start", type=Path, help="demo model whose weights the run begins with")
    end = parser.add_mutually_exclusive_group()
    end.add_argument("--minutes", type=float, help="length of the run")
    end.add_argument("--until", help="UTC time HH:MM at which the run ends")
    end.add_argument("--steps", type=int, default=default.steps, help="length of the run in steps")
    end.add_argument("--card-only", action="store_true", help="only write the card of the model in --out again")
    for name in ("seed", "workers", "rows", "muon_lr", "adam_lr", "chat", "device", "save_every_s"):
        value = getattr(default, name)
        parser.add_argument("--" + name.replace("_", "-"), type=type(value), default=value)
    given = vars(parser.parse_args(arguments))
    minutes, until = given.pop("minutes"), given.pop("until")
    until_s = time.time() + 60 * minutes if minutes else _next_utc(until) if until else None
    if given["device"] != "cpu":
        given["workers"] = 1
    return Settings(until_s=until_s, **given)


def _next_utc(clock: str) -> float:
    now = datetime.datetime.now(datetime.timezone.utc)
    hour, minute = (int(part) for part in clock.split(":"))
    end = now.replace(hour=hour, minute=minute, second=0, microsecond=0)
    return (end if end > now else end + datetime.timedelta(days=1)).timestamp()


if __name__ == "__main__":
    train(parse(), " ".join(["python tools/train_demo.py", *sys.argv[1:]]))
