"""The bytes of weights outside the experts, against a count by hand."""

from __future__ import annotations

import pytest

from expertly.model.structure import dense_shape
from tests.model.conftest import Toys


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "switch_transformers"])
def test_blocks_and_the_rest_by_hand(family: str, toys: Toys) -> None:
    toy = toys[family]
    nbytes = {name: one.numel() * one.element_size() for name, one in toy.model.named_parameters()}
    row = 32 * 4
    if family == "qwen3_moe":  # three MoE layers; the table and the head are two
        blocks = [f"model.layers.{i}." for i in range(3)]
        rest = row + nbytes["model.norm.weight"] + nbytes["lm_head.weight"]
    elif family == "deepseek_v3":  # the first of three layers is dense
        blocks = [f"model.layers.{i}." for i in (1, 2)]
        first = sum(n for name, n in nbytes.items() if name.startswith("model.layers.0."))
        rest = row + nbytes["model.norm.weight"] + nbytes["lm_head.weight"] + first
    else:  # every other block of both stacks; the table is the head
        blocks = [f"{stack}.block.{i}." for stack in ("encoder", "decoder") for i in (1, 3)]
        dense = [f"{stack}.block.{i}." for stack in ("encoder", "decoder") for i in (0, 2)]
        rest = sum(n for name, n in nbytes.items() if name.startswith(tuple(dense)))
        tables = [name for name in nbytes if name.endswith("relative_attention_bias.weight")]
        rest -= sum(nbytes[name] for name in tables)
        rest += sum(nbytes[name] // toy.model.get_parameter(name).shape[0] for name in tables)
        rest += nbytes["shared.weight"] + sum(n for name, n in nbytes.items() if "final_layer_norm" in name)
    in_blocks = sum(n for name, n in nbytes.items() if name.startswith(tuple(blocks)))
    found = dense_shape(toy.model)
    assert (found.layer_nbytes, found.head_nbytes) == (in_blocks // len(blocks), rest)
