"""How the memory of a server is divided: the plan of `load`, with a KV cache that requests share."""

from __future__ import annotations

import pytest
import torch

from expertly.core.errors import BudgetError, ConfigError
from expertly.engine import memory
from expertly.engine.memory import Division, MemoryRequest, divide
from expertly.model.packing import pack_cached
from expertly.scheduler.systems import get_system
from expertly.serve.memory import PAGE_TOKENS, cache_for
from expertly.serve.settings import ServeOptions
from expertly.store.packed import PackedStore

MIB = 1 << 20
OWN = 204 * MIB


@pytest.fixture(scope="module")
def store() -> PackedStore:
    return pack_cached(None, "float32")


@pytest.fixture(autouse=True)
def _own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "rss_nbytes", lambda: OWN)


def divided(store: PackedStore, system: str = "lru", **told: int | str) -> Division:
    options = ServeOptions(system=system, **told)  # type: ignore[arg-type]
    request = MemoryRequest(
        options.memory, total=options.total_memory, context=options.context, cache=cache_for(options, store)
    )
    return divide(store, store.geometry(), get_system(system), request, torch.device("cpu"))


@pytest.mark.parametrize("total", [430, 490, 1000])
def test_a_total_holds_the_process_and_everything_else(store: PackedStore, total: int) -> None:
    division = divided(store, total_memory=f"{total}MiB")
    beside, experts = division.beside, division.budget.memory_nbytes
    cache = division.context * beside.cache_nbytes
    used = OWN + beside.dense_nbytes + beside.fixed_nbytes + cache + experts
    assert used <= total * MIB
    if experts < store.experts_nbytes:
        assert used > (total - 2) * MIB, "nothing is left over"
        assert experts > 2 * cache or division.context == cache_for(ServeOptions(), store).least
    assert division.context >= 1024 + PAGE_TOKENS, "one text always fits"


def test_a_cache_takes_what_experts_do_not_need(store: PackedStore) -> None:
    few, many = (divided(store, total_memory=f"{total}MiB") for total in (520, 700))
    assert many.budget.memory_nbytes == store.experts_nbytes
    assert many.context > few.context
    stated = divided(store, total_memory="1500MiB", kv_tokens=2000)
    assert stated.context == 65 * PAGE_TOKENS


def test_what_is_stated_for_experts_they_get_and_the_cache_gets_the_rest(store: PackedStore) -> None:
    division = divided(store, memory="25%")
    assert division.budget.memory_nbytes == pytest.approx(store.experts_nbytes / 4, rel=0.02)
    with pytest.raises(BudgetError, match=r"KV cache of 1000000064 tokens .* accepted: less memory"):
        divided(store, memory="25%", kv_tokens=999_999_999)
    with pytest.raises(BudgetError, match=r"of 254 MiB this process takes 204 MiB; dense weights take .* working"):
        divided(store, total_memory="254MiB")
    with pytest.raises(ConfigError, match="of 900 MiB this process takes 204 MiB"):
        divided(store, "resident", total_memory="900MiB", kv_tokens=200_000)


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ({"context": 99_999}, "at most the model's 1024"),
        ({"max_running": 5000}, "at most 256"),
        ({"kv_tokens": 10}, "1024 or more, for one text of 1024"),
    ],
)
def test_what_cannot_be_is_named(store: PackedStore, told: dict[str, int], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        divided(store, **told)
