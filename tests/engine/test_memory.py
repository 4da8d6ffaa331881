"""What `--memory` accepts, and what `auto` chooses."""

from __future__ import annotations

import pytest

from expertly.core.errors import BudgetError, ConfigError
from expertly.core.resources import parse_memory
from expertly.engine.memory import (
    BESIDE_NBYTES,
    WORKING_NBYTES,
    available_host_nbytes,
    choose_amount,
    kv_cache_nbytes,
    working_nbytes,
)

GIB = 1 << 30


@pytest.mark.parametrize(
    ("memory", "nbytes"),
    [
        ("25%", 250),
        ("12.5 %", 125),
        ("100%", 1000),
        ("1.5GiB", 3 * GIB // 2),
        ("800MB", 800_000_000),
        ("64k", 65536),
        (4096, 4096),
        ("4096", 4096),
        (" 2 gib ", 2 * GIB),
        ("auto", None),
    ],
)
def test_amounts_and_shares_are_understood(memory: str | int, nbytes: int | None) -> None:
    assert parse_memory(memory, 1000) == nbytes


@pytest.mark.parametrize("memory", ["", "lots", "25 percent", "-1GiB", "1.5XiB", "%", "1e9"])
def test_anything_else_is_named_with_what_is_accepted(memory: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_memory(memory, 1000)
    assert repr(memory) in str(caught.value)
    assert "25%" in str(caught.value) and "auto" in str(caught.value)


@pytest.mark.parametrize("memory", ["0", "0%", 0])
def test_no_memory_is_refused(memory: str | int) -> None:
    with pytest.raises(BudgetError, match="no memory"):
        parse_memory(memory, 1000)


@pytest.mark.parametrize(
    ("available", "experts", "dense", "cache", "nbytes", "says"),
    [
        (8 * GIB, 40 * GIB, 2 * GIB, GIB, 5 * GIB - WORKING_NBYTES, "8.00 GiB are free"),
        (64 * GIB, GIB, 0, 0, GIB, "all experts fit"),
        (GIB, 8 * GIB, 2 * GIB, 0, 0, "(0.0% of the experts)"),
    ],
)
def test_auto_leaves_room_for_the_dense_part_the_cache_and_working_memory(
    available: int, experts: int, dense: int, cache: int, nbytes: int, says: str
) -> None:
    chosen, reason = choose_amount(available, experts, dense, cache, context=4096)
    assert chosen == nbytes
    assert says in reason and "4096 tokens" in reason


def test_working_memory_is_what_a_prompt_of_this_model_takes() -> None:
    small = {"hidden_size": 256, "intermediate_size": 1024, "num_experts_per_tok": 4}
    large = {"text_config": {"hidden_size": 4096, "intermediate_size": 14336, "num_experts_per_tok": 2}}
    assert BESIDE_NBYTES < working_nbytes(small, 512, 2) < BESIDE_NBYTES + (10 << 20)
    assert working_nbytes(small, 1024, 2) - BESIDE_NBYTES == 4 * (working_nbytes(small, 256, 2) - BESIDE_NBYTES)
    assert working_nbytes(large, 4096, 2) > WORKING_NBYTES, "what is known of the model counts, in both directions"
    chosen, _ = choose_amount(8 * GIB, 40 * GIB, 0, 0, 512, working_nbytes(small, 512, 2))
    assert chosen == 8 * GIB - working_nbytes(small, 512, 2)


def test_available_memory_is_positive_and_within_the_machine() -> None:
    with open("/proc/meminfo") as file:
        total = int(file.readline().split()[1]) << 10
    assert 0 < available_host_nbytes() <= total


def test_kv_cache_of_grouped_latent_and_encoder_decoder_attention() -> None:
    grouped = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": 12}
    assert kv_cache_nbytes(grouped, 100, 2) == 12 * 2 * 64 * 100 * 2
    latent = {"num_attention_heads": 4, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
    assert kv_cache_nbytes(latent | {"v_head_dim": 8, "num_hidden_layers": 3}, 10, 4) == 3 * 4 * 24 * 10 * 4
    switch = {"num_heads": 4, "d_kv": 8, "num_layers": 2, "num_decoder_layers": 2}
    assert kv_cache_nbytes(switch, 10, 4) == 4 * 4 * 16 * 10 * 4
