"""Every MoE language model that transformers can make computes what the unmodified model computes, or is named here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import expertly
from expertly.core.errors import ExpertlyError
from expertly.model.packing import pack
from tests.engine.observe import loaded
from tests.every_family import families, make_model
from tests.families import VOCAB_SIZE

NUM_PROMPT, NUM_DECODED, NUM_NEW, NUM_PADS = 12, 6, 6, 4
CLOSE = 1e-4  # of the largest logit

CANNOT_BE_MADE = {"dbrx": "transformers cannot make it from its default config"}

REFUSED = {
    "doge": "its experts are rows of a table",
    "jetmoe": "not on transformers' experts interface",
    "llama4_text": "not on transformers' experts interface",
    "longcat_flash": "not on transformers' experts interface",
}
"""Families that `expertly.load` refuses, with the reason that it gives in other words."""

OWN_ATTENTION = {
    **dict.fromkeys(("axk2", "deepseek_v32", "dots3_note_text", "glm_moe_dsa", "hy_v4"), "indices"),
    "inkling_text": "position_bias",
    "minimax_m3_vl_text": "block_indices",
}
"""Families of which no layer's attention is a kernel's, and why."""


@dataclass(frozen=True)
class Run:
    """What a model makes of a prompt, and of the tokens behind it one by one."""

    prompt: torch.Tensor  # logits [B, NUM_PROMPT, V]
    decoded: torch.Tensor  # [B, NUM_DECODED, V]
    tokens: list[list[int]]


def run(model: Any, num_sequences: int) -> Run:
    """One sequence; or two, the second of which is padded on the left."""
    dice = torch.Generator().manual_seed(1)
    ids = torch.randint(4, VOCAB_SIZE, (num_sequences, NUM_PROMPT + NUM_DECODED), generator=dice)
    mask = torch.ones_like(ids)
    ids[1:, :NUM_PADS] = mask[1:, :NUM_PADS] = 0
    with torch.no_grad():
        output = model(ids[:, :NUM_PROMPT], attention_mask=mask[:, :NUM_PROMPT], use_cache=True)
        prompt, decoded = output.logits, []
        for i in range(NUM_PROMPT, NUM_PROMPT + NUM_DECODED):
            output = model(
                ids[:, i : i + 1],
                attention_mask=mask[:, : i + 1],
                past_key_values=output.past_key_values,
                use_cache=True,
            )
            decoded.append(output.logits)
        settings = {"do_sample": False, "max_new_tokens": NUM_NEW}
        tokens = model.generate(ids[:, :NUM_PROMPT], attention_mask=mask[:, :NUM_PROMPT], **settings)
    prompt[1:, :NUM_PADS] = 0  # of padding
    return Run(prompt, torch.cat(decoded, dim=1), tokens[:, NUM_PROMPT:].tolist())


def assert_same(ours: Run, theirs: Run) -> None:
    for name in ("prompt", "decoded"):
        got, expected = getattr(ours, name), getattr(theirs, name)
        error = float((got - expected).abs().max() / expected.abs().max())
        assert error < CLOSE, f"{name}: {error}"
    assert ours.tokens == theirs.tokens


@pytest.mark.parametrize("family", families())
def test_every_family_is_the_reference(family: str, tmp_path: Path) -> None:
    if family in CANNOT_BE_MADE:
        with pytest.raises((AttributeError, TypeError, ValueError)):
            make_model(family)
        return
    folder, store = tmp_path / "model", tmp_path / "store"
    model = make_model(family)
    model.save_pretrained(folder)
    if family in REFUSED:
        with pytest.raises(ExpertlyError):
            pack(folder, store)
        return
    reference = type(model).from_pretrained(folder).eval()
    expected = [run(reference, 1), run(reference, 2)]
    pack(folder, store)
    for settings in ({"system": "resident", "memory": "100%"}, {"memory": "50%"}):
        with loaded(store, dtype="float32", **settings) as ours:
            assert ours.config._attn_implementation == reference.config._attn_implementation
            for num, theirs in enumerate(expected, 1):
                assert_same(run(ours, num), theirs)
            told = expertly.stats(ours).as_dict()
        assert told["phases"]["decode"]["hits"] + told["phases"]["decode"]["misses"] > 0
        if told["kernels"]["name"] != "torch":
            assert (told["kernels"]["attention"] == 0) == (family in OWN_ATTENTION)


def test_no_reason_outlives_its_family() -> None:
    assert {*CANNOT_BE_MADE, *REFUSED, *OWN_ATTENTION} <= families().keys()
