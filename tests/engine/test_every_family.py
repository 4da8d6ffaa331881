"""Every MoE language model that transformers can make computes what the unmodified model computes, or is named here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import expertly
from expertly.core.errors import ConfigError, ExpertlyError
from expertly.model.packing import pack
from tests.engine.observe import loaded
from tests.every_family import families, make_model
from tests.families import VOCAB_SIZE
from tests.tables import IS_FULL

NUM_PROMPT, NUM_NEW, NUM_PADS = 12, 7, 4
CLOSE = 1e-4  # of the largest logit

AHEAD = [("expertly-ahead", "25%"), ("expertly-ahead:segments=2", "25%")]
MORE = [("resident", "100%"), ("expertly-ahead", "100%"), ("lru:segments=2", "25%")]
"""One of the first for each family, in turn; one of the others, too, for those whose layers run as programs."""

CANNOT_BE_MADE = {
    "diffusion_gemma": "its default has no experts; it writes blocks of tokens, without logits",
    "qwen3_omni_moe": "it writes speech beside text; its text is qwen3_omni_moe_thinker",
}

REFUSED = {
    "dbrx": "its experts are rows of one matrix",
    "doge": "its experts are rows of a table",
    "jetmoe": "its attention has experts, too, which are called in two parts",
}
"""Families that `expertly.load` refuses, with the reason that it gives in other words."""

OWN_ATTENTION = {
    **dict.fromkeys(("axk2", "deepseek_v32", "glm_moe_dsa", "mistral_large4"), "indices"),
    **dict.fromkeys(("dots3_note", "dots3_note_text", "hy_v4", "hy_v4_vl"), "indices"),
    **dict.fromkeys(("inkling_mm_model", "inkling_text"), "position_bias"),
    **dict.fromkeys(("minimax_m3_vl", "minimax_m3_vl_text"), "block_indices"),
}
"""Families of which no layer's attention is a kernel's, and why."""

NO_LOOKAHEAD = {"zaya": "its routers need what the layer before had"}
"""Families of which nothing can ask a router early."""

TEXT_ALONE = {"llama4"}
"""Families whose model of images and text fails on text in transformers."""

HAS_PROGRAMS = {
    *("aria", "aria_text", "dots1", "glm4_moe", "glm4v_moe", "gpt_oss", "granitemoe", "granitemoe_swa"),
    *("granitemoeshared", "hunyuan_v1_moe", "mellum", "minimax_m2", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"),
    *("qwen3_omni_moe_thinker", "qwen3_vl_moe", "sarvam_moe", "solar_open"),
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


@pytest.mark.parametrize(("number", "family"), enumerate(families()))
def test_every_family_is_the_reference(number: int, family: str, tmp_path: Path) -> None:
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
    alone = AutoModelForCausalLM if family in TEXT_ALONE else type(model)
    reference = alone.from_pretrained(folder).eval()
    expected = [run(reference, 1), run(reference, 2)]
    pack(folder, store)
    usages = [AHEAD[number % 2], MORE[number % 3]]
    for system, memory in [*AHEAD, *MORE] if IS_FULL else usages[: 1 + (family in {*HAS_PROGRAMS, *NO_LOOKAHEAD})]:
        if family in NO_LOOKAHEAD and system.startswith("expertly-ahead"):
            with pytest.raises(ConfigError, match="nothing can ask the routers"), loaded(store, system=system):
                pass
            continue
        with loaded(store, dtype="float32", system=system, memory=memory) as ours:
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


def test_layers_that_go_by_the_token_are_known_when_the_pass_begins(tmp_path: Path) -> None:
    """Of DeepSeek-V4's first layers every expert is predicted, of every pass, and none that is not needed."""
    make_model("deepseek_v4").save_pretrained(tmp_path / "model")
    pack(tmp_path / "model", tmp_path / "store")
    with loaded(tmp_path / "store", dtype="float32", system="expertly-ahead") as ours:
        for num in (1, 2):  # sequences, the second with pads
            run(ours, num)
        stats = expertly.stats(ours).as_dict()
    assert stats["prediction"]["layers_left_out"] == []
    for layer in stats["layers"][:2]:
        for phase in ("prefill", "decode"):
            counts = layer[phase]
            assert counts["predicted"] == counts["predicted_needed"] == counts["predicted_of"] > 0
    assert stats["layers"][3]["decode"]["predicted"] > 0, "and the others are asked"


def test_no_reason_outlives_its_family() -> None:
    assert {*CANNOT_BE_MADE, *REFUSED, *NO_LOOKAHEAD, *OWN_ATTENTION, *HAS_PROGRAMS, *TEXT_ALONE} <= families().keys()
