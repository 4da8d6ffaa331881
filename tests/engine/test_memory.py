"""What `--memory` accepts, and what `auto` chooses."""

from __future__ import annotations

import pytest

from expertly.core import resources
from expertly.core.errors import BudgetError, ConfigError
from expertly.core.resources import available_host_nbytes, parse_memory
from expertly.engine.memory import WORKING_NBYTES, BesideExperts, RoomBeside
from expertly.model.needs import kv_cache_nbytes, pass_nbytes

GIB = 1 << 30


AMOUNTS: dict[str | int, int | None] = {"25%": 250, "12.5 %": 125, "100%": 1000, 4096: 4096, "auto": None}
AMOUNTS |= {"1.5GiB": 3 * GIB // 2, "800MB": 800_000_000, "64k": 65536, "4096": 4096, " 2 gib ": 2 * GIB}


NO_AMOUNTS = [
    "",
    " ",
    "%",
    "50%%",
    "NaN%",
    "25 percent",
    "lots",
    "inf",
    "0x10",
    "-1",
    "1e9",
    "1e400",
    "-1GiB",
    "1,5GiB",
]
NO_AMOUNTS += ["1.5XiB", "٣GiB", "9" * 400 + "GiB"]


def test_amounts_and_shares_are_understood_and_anything_else_is_named() -> None:
    assert {stated: parse_memory(stated, 1000) for stated in AMOUNTS} == AMOUNTS
    for stated in NO_AMOUNTS:
        with pytest.raises(ConfigError, match=rf"'{stated[:60]}.*25%.*auto"):
            parse_memory(stated, 1000)
    for nothing in ("0", "0%", 0):
        with pytest.raises(BudgetError, match="no memory"):
            parse_memory(nothing, 1000)


def test_a_pass_that_does_not_fit_is_refused_with_the_numbers() -> None:
    room = RoomBeside(100 << 20, BesideExperts(0, 0, 1 << 14, 1 << 14))
    room.check(0, 3200)
    room.check(6399, 0)  # what was read before has no activations any more
    with pytest.raises(BudgetError, match=r"30000 tokens behind 100: .* 939 MiB, and 100 MiB are left.*context=30100"):
        room.check(100, 30_000)


def test_a_cgroups_page_cache_can_be_had_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """(limit, usage, of which page cache) of each above us: the tightest counts."""
    monkeypatch.setattr(resources, "_cgroup_limits", lambda: [(10 << 20, 9 << 20, 4 << 20), (90 << 20, 9 << 20, 0)])
    assert available_host_nbytes() == 5 << 20


def test_what_a_pass_and_its_kv_cache_take() -> None:
    small = {"hidden_size": 256, "intermediate_size": 1024, "num_experts_per_tok": 4}
    large = {"text_config": {"hidden_size": 4096, "intermediate_size": 14336, "num_experts_per_tok": 2}}
    assert pass_nbytes(small, 2) == 2 * (256 * 16 + 3 * 1024)
    assert 4096 * pass_nbytes(large, 2) > WORKING_NBYTES, "what is known of the model counts, in both directions"
    grouped = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": 12}
    for config in (grouped, {"text_config": grouped}, grouped | {"text_config": None}):
        assert kv_cache_nbytes(config, 100, 2) == 12 * 2 * 64 * 100 * 2
    latent = {"num_attention_heads": 4, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
    assert kv_cache_nbytes(latent | {"v_head_dim": 8, "num_hidden_layers": 3}, 10, 4) == 3 * 4 * 24 * 10 * 4
