"""Every MoE language model that transformers can make computes what the unmodified model computes, or is named here."""

from __future__ import annotations

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

NUM_PROMPT, NUM_NEW, NUM_PADS = 12, 7, 4
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


HAS_PROGRAMS = {
    *("aria_text", "dots1", "glm4_moe", "gpt_oss", "granitemoe", "granitemoe_swa", "granitemoeshared"),
    *("hunyuan_v1_moe", "mellum", "minimax_m2", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "sarvam_moe"),
    "solar_open",
}
"""Families whose layers run as programs, once a sequence alone has decoded three tokens."""


def run(model: Any, num_sequences: int) -> tuple[list[list[int]], torch.Tensor]:
    """What one sequence goes on with, or two, the second of which is padded on the left: tokens and logits [N, B, V],
    through the cache from the second on.
    """
    ids = torch.randint(4, VOCAB_SIZE, (num_sequences, NUM_PROMPT), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    ids[1:, :NUM_PADS] = mask[1:, :NUM_PADS] = 0
    settings = {"do_sample": False, "max_new_tokens": NUM_NEW, "output_logits": True, "return_dict_in_generate": True}
    output = model.generate(ids, attention_mask=mask, **settings)
    return output.sequences.tolist(), torch.stack(output.logits)


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
            for num, (tokens, logits) in enumerate(expected, 1):
                our_tokens, our_logits = run(ours, num)
                assert our_tokens == tokens
                assert float((our_logits - logits).abs().max() / logits.abs().max()) < CLOSE
            stats = expertly.stats(ours).as_dict()
        kernels, decode = stats["kernels"], stats["phases"]["decode"]
        assert decode["hits"] + decode["misses"] > 0
        assert (kernels["attention"] == 0) == (family in OWN_ATTENTION)
        assert (kernels["programs"] > 0) == (family in HAS_PROGRAMS)


def test_no_reason_outlives_its_family() -> None:
    assert {*CANNOT_BE_MADE, *REFUSED, *OWN_ATTENTION, *HAS_PROGRAMS} <= families().keys()
