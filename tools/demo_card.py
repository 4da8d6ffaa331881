"""Writes the demo model's card: data, licences, cost of training, and what was measured on held-out text."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from demo_data import DOMAINS, EOT, Corpus
from demo_eval import DomainResult, divergences, measure
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

QUESTIONS = (
    "Hello!",
    "What is the capital of Portugal?",
    "How much is 8 + 6?",
    "Julia has 12 coins and finds 5 more. How many coins does Julia have now?",
    "What is expertly?",
    "Is a stone alive?",
    "Where do you keep bread?",
    "Write a Python function that returns the square of a number.",
)
PROMPTS = (
    ("English", "The old man looked at the sea and"),
    ("French", "La fonction renvoie une liste"),
    ("Spanish", "Este módulo proporciona"),
    ("Russian", "Жила-была маленькая девочка"),
    ("Chinese", "春風"),
    ("Code", "### Instruction:\nWrite a Python function that adds two numbers.\n### Response:\n"),
)


@dataclass(frozen=True, slots=True)
class Sitting:
    """One run of tools/train_demo.py; a model's own are in its training.json."""

    command: str
    hardware: str
    steps: int
    tokens: int
    elapsed_s: float


def read_sittings(folder: Path | None) -> list[Sitting]:
    """What the model in `folder` was trained by, oldest first; nothing of no folder."""
    return [Sitting(**one) for one in json.loads((folder / "training.json").read_text())] if folder else []


def write_card(
    folder: Path, tokenizer: PreTrainedTokenizerFast, corpora: list[Corpus], sittings: list[Sitting]
) -> None:
    """Measure the model in `folder` (bfloat16 computed in float32); write MODEL_CARD.md and training.json there."""
    (folder / "training.json").write_text(json.dumps([asdict(one) for one in sittings], indent=2) + "\n")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    results = [measure(model, tokenizer, corpus) for corpus in corpora]
    sections = [
        _head(model),
        _data(corpora, sittings),
        _losses(results),
        _experts(results),
        _samples(model, tokenizer),
    ]
    (folder / "MODEL_CARD.md").write_text("\n".join(sections), encoding="utf-8")


def _head(model: PreTrainedModel) -> str:
    config = model.config
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    top_k, width = config.num_experts_per_tok, config.moe_intermediate_size
    per_expert = 3 * config.hidden_size * width
    idle = config.num_hidden_layers * (config.num_experts - top_k) * per_expert
    return f"""# Demo model

A small Mixture-of-Experts language model for tests, examples and measurements of `expertly`. Its routing is learned, so
that caches and predictors meet the skew and the locality of a real model. It answers in the form that it was asked for,
and mostly wrongly: what it learned by heart (greetings, capitals, what it is) it says, what it must reason it does not.

| | |
| --- | --- |
| architecture | `{config.model_type}` of transformers, {config.num_hidden_layers} layers, hidden {config.hidden_size} |
| experts | {config.num_experts} a layer, top-{top_k}, intermediate {width} |
| parameters | {num_parameters:,} ({num_parameters - idle:,} active for a token), bfloat16 |
| tokenizer | byte-level BPE, {config.vocab_size} tokens, `<|endoftext|>` ends a document |
| chat | `<|user|>question<|assistant|>answer<|endoftext|>`: its two tokens in place of bytes that UTF-8 lacks |
| context | {config.max_position_embeddings} tokens |
| licence of the weights | Apache-2.0 |
"""


def _data(corpora: list[Corpus], sittings: list[Sitting]) -> str:
    plain, chat = (
        "\n".join(
            f"| {c.domain.name} | {c.domain.source} | {c.domain.licence} | {c.domain.share:.0%} | {len(c.train):,} |"
            for c in corpora
            if bool(c.domain.pairs) is is_chat
        )
        for is_chat in (False, True)
    )
    runs = "\n".join(
        f"| `{s.command}` | {s.steps:,} | {s.tokens:,} | {s.elapsed_s / 60:.0f} | {s.hardware} |" for s in sittings
    )
    return f"""## Data and training

| domain | text | licence | share of sequences | tokens available |
| --- | --- | --- | --- | --- |
{plain}

With `--chat SHARE` that share of the sequences is conversations (tools/demo_chat.py), of which only answers count:

| conversations | made of | licence | share of them | tokens available |
| --- | --- | --- | --- | --- |
{chat}

A sequence comes from one domain. Documents are shuffled and the last 1 % of each domain (at least two) held out; the
held-out text is used for nothing but the tables below.

{sum(s.tokens for s in sittings):,} tokens, each sitting beginning with the weights of the one before:

| command | steps | tokens | minutes | on |
| --- | --- | --- | --- | --- |
{runs}

Muon for the matrices, Adam for the rest; load-balancing loss 0.01 a layer over a running mean of the load, router
z-loss 1e-4; sequences of 256 tokens, then of 1024 for the last 15 % of a sitting.
"""


def _losses(results: list[DomainResult]) -> str:
    rows = "\n".join(
        f"| {r.name} | {r.num_tokens:,} | {r.nats_per_token:.3f} | {r.bits_per_byte:.3f} |" for r in results
    )
    mean = np.mean([r.nats_per_token for r in results if r.name in {domain.name for domain in DOMAINS}])
    return f"""## Held-out loss

The shipped bfloat16 weights computed in float32, in windows of 256 tokens; of conversations the answers.

| domain | tokens | nats a token | bits a byte |
| --- | --- | --- | --- |
{rows}

Mean over the domains of text: {mean:.3f} nats a token (a uniform guess: {np.log(8192):.3f}).
"""


def _experts(results: list[DomainResult]) -> str:
    load = np.mean([r.load for r in results], axis=0)  # [L, E]
    between, within = divergences(results)
    rows = "\n".join(
        f"| {layer} | {load[layer].min():.2%} | {load[layer].max():.2%} | {int((load[layer] == 0).sum())} "
        f"| {between[layer]:.3f} | {within[layer]:.3f} |"
        for layer in range(len(load))
    )
    layer = int(between.argmax())
    tops = "\n".join(
        f"| {r.name} | " + ", ".join(f"{e} ({r.load[layer, e]:.0%})" for e in np.argsort(-r.load[layer])[:4]) + " |"
        for r in results
    )
    return f"""## Experts

Shares of a layer's assignments on held-out text, every domain counted equally; even is {1 / load.shape[1]:.2%}.
Divergence is Jensen-Shannon in bits between the domains' shares, mean over pairs of domains; beside it, as the noise of
the sample, between two halves of the same domain.

| layer | least used | most used | dead experts | divergence between domains | within a domain |
| --- | --- | --- | --- | --- | --- |
{rows}

The experts each domain uses most in layer {layer}:

| domain | expert (share) |
| --- | --- |
{tops}
"""


def _samples(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> str:
    parts = ["## Answers\n\nGreedy.\n\n| question | answer |\n| --- | --- |"]
    for question in QUESTIONS:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        answer = _continue(model, tokenizer, str(prompt), is_sampled=False)
        parts.append(f"| {question} | {answer.replace(chr(10), '<br>').replace('|', chr(92) + '|')} |")
    parts = ["\n".join(parts) + "\n"]
    ways = "greedy and sampled (temperature 0.8, top-p 0.95)"
    parts.append(f"## Samples\n\nThe prompt, then what the model wrote, {ways}.\n")
    for name, prompt in PROMPTS:
        greedy, sampled = (_continue(model, tokenizer, prompt, is_sampled) for is_sampled in (False, True))
        parts.append(f"**{name}**\n\n```text\n{prompt}\n--- greedy:\n{greedy}\n--- sampled:\n{sampled}\n```\n")
    return "\n".join(parts)


def _continue(model: Any, tokenizer: PreTrainedTokenizerFast, prompt: str, is_sampled: bool) -> str:
    torch.manual_seed(0)
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    options = {"do_sample": True, "temperature": 0.8, "top_p": 0.95, "top_k": 0} if is_sampled else {"do_sample": False}
    ids = model.generate(**inputs, max_new_tokens=60, **options)[0, inputs["input_ids"].shape[1] :]
    return str(tokenizer.decode(ids)).replace(EOT, "").replace("```", "'''").strip("\n")
