"""bench/peers: a peer answers over its pipes, and how its process ended is said in words."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parents[2] / "bench" / "peers"
DEMO = Path(__file__).parents[2] / "src" / "expertly" / "data" / "demo"
OURS = {"peer": "expertly", "model": str(DEMO), "system": "lru", "memory": "25%", "quantize": None, "context": 512}


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.syspath_prepend(str(HERE.parent))
    import pages
    import players

    yield players, pages
    for name in ("pages", "players"):
        sys.modules.pop(name)


def test_a_peer_plays_what_it_is_fed_until_it_is_killed(peers: Any) -> None:
    players, pages = peers
    (request,) = pages.make_requests(DEMO, 1, 40, 6)
    assert len(request["ids"]) == 46
    player = players.Player(OURS)
    try:
        first, second = (player.play(request | {"threads": 1}) for _ in range(2))
        os.kill(player._process.pid, signal.SIGKILL)
        with pytest.raises(players.Ended, match="ended by SIGKILL"):
            player.play(request | {"threads": 1})
    finally:
        player.close()
    assert len(first["greedy"]) == 7 and first["greedy"] == second["greedy"], "the prompt's choice and six more"
    assert first["hits_a_token"] + first["partial_hits_a_token"] + first["misses_a_token"] == 12 * 4
    assert first["ttft_s"] > 0 and first["bytes_loaded_a_token"] > 0
    assert player.loaded["facts"]["memory_bytes"] > 0


def test_why_a_peer_cannot_begin_is_said(peers: Any) -> None:
    players, _ = peers
    with pytest.raises(players.Ended, match="KeyError: 'nobody'"):
        players.Player(OURS | {"peer": "nobody"})
