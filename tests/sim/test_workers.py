"""Several machines: closed forms, a timeline worked out by hand, and each worker as if it were simulated alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from expertly.core.errors import ConfigError, HardwareError
from expertly.core.geometry import LayerGeometry
from expertly.core.placement import Placement, Share
from expertly.scheduler.counters import PhaseCounters
from expertly.scheduler.presets import SYSTEMS
from expertly.scheduler.scheduler import Scheduler
from expertly.sim.hardware import NETWORK_NAMES, ClusterNetwork
from expertly.sim.simulator import Simulator
from expertly.sim.study import Memory, Study
from expertly.sim.workers import SimulatedWorkers
from tests.sim.drive import Pass, make_study, make_trace, measured, random_passes, sized

INFINITE = ClusterNetwork("infinite", float("inf"), 0, 0)
LRU = SYSTEMS["lru"]


def group(
    study: Study, held: list[list[int]], memories: list[str], network: ClusterNetwork = INFINITE
) -> tuple[Simulator, SimulatedWorkers]:
    """Every layer is dealt out alike: `held` is what the local machine and each worker hold of it."""
    shares = [Share(study.geometry, [experts] * study.geometry.num_layers) for experts in held]
    return study.simulate_group(LRU, shares, [Memory(memory) for memory in memories], network)


def shifted(passes: list[Pass]) -> list[Pass]:
    """No token chooses expert 0 any more: all ids are one higher."""
    return [
        (request, is_prefill, [[[expert + 1 for expert in chosen] for chosen in row] for row in rows])
        for request, is_prefill, rows in passes
    ]


def test_a_worker_that_has_all_behind_an_infinite_network_is_one_device(tmp_path: Path) -> None:
    """The local machine holds an expert that nobody chooses."""
    eight, nine = sized(3, 8, 2), sized(3, 9, 2)
    passes = random_passes(1, eight, 40, prompt=5, num_requests=2)
    alone = make_study(make_trace(tmp_path / "alone", passes, eight, num_requests=2))
    one = alone.simulate(LRU, Memory("40%").budget(alone.geometry))
    several = make_study(make_trace(tmp_path / "several", shifted(passes), nine, num_requests=2))
    local, workers = group(several, [[0], list(range(1, 9))], ["100%", "40%"])
    assert local.clock.now_ns == one.clock.now_ns
    assert local.metrics.times_by_request(False) == one.metrics.times_by_request(False)
    assert local.metrics.hits_by_request() == one.metrics.hits_by_request()
    assert local.metrics.stall_ns == one.metrics.stall_ns > 0
    assert workers.network_ns == 0 and counted(workers.schedulers[0]) == counted(one.scheduler)

    network = ClusterNetwork("far", float("inf"), 700, 50)
    far, workers = group(several, [[0], list(range(1, 9))], ["100%", "40%"], network)
    num_layers = 3 * 2 * (1 + 40)
    assert far.clock.now_ns - local.clock.now_ns == workers.network_ns == num_layers * (2 * 700 + 50)
    assert far.metrics.stall_ns == one.metrics.stall_ns, "the network is no stall"


def test_times_of_a_hand_computed_layer_are_exact_to_the_nanosecond(tmp_path: Path) -> None:
    """Computing an expert takes 50 ns, loading one into an idle machine 7 + 83. A row is 2 bytes, 4 ns of the network,
    whose latency is 20; a call costs 30. The local machine holds experts 0 and 1, the second worker 6 and 7; the first
    has only staging slots for 2 to 5.

    100   The dense part has ended. The local machine computes expert 0 until 150.
    134   The first call has left. It is there at 154, expert 2 is loaded until 244 and computed until 294; the answer
          reaches the local link at 314 and is in at 318.
    138   The second call has left. It is there at 158; computed until 208, at the link at 228, in at 232.
    318   The layer has ended, which with an infinite network it had at 100 + 140. The head takes until 1318.
    1418  Two tokens: 0, 2 and 6; 0, 6 and 7. A call with one row leaves until 1452, one with two until 1460. The first
          worker loads from 1472 until 1562, is done at 1612, at the link at 1632 and in at 1636. The second computes
          two experts from 1480 until 1580; its three rows reach the link at 1600 and are in at 1612.
    """
    layers = sized(1, 8, 3, width=10)
    passes = [(0, False, [[[0, 2, 6]]]), (0, False, [[[0, 2, 6]], [[0, 6, 7]]])]
    study = make_study(make_trace(tmp_path / "trace", passes, layers))
    held, network = [[0, 1], [2, 3, 4, 5], [6, 7]], ClusterNetwork("toy", 0.5e9, 20, 30)
    local, workers = group(study, held, ["100%", "75%", "100%"], network)
    assert local.clock.now_ns == 2636
    assert workers.network_ns == (318 - 240) + (1636 - (1418 + 140))
    assert local.metrics.stall_ns == 2 * 90, "what the first worker waited for its disk"
    assert (workers.sent_nbytes, workers.received_nbytes) == (2 * 2 + 2 + 4, 2 * 2 + 2 + 6)
    assert local.metrics.hits_by_request() == [(5, 7)]


@pytest.mark.parametrize("num_workers", [1, 2, 4, 8])
def test_all_calls_and_answers_share_the_local_link(num_workers: int, tmp_path: Path) -> None:
    """Each worker computes two experts in 100 ns. Rows of 24 bytes at 1 byte/ns leave one after the other; the first
    answer comes when the first worker has ended, and from then on the link brings two rows of each.
    """
    layers = (LayerGeometry(2 * num_workers + 1, 2 * num_workers, 24, 10, 2, 1),)
    study = make_study(make_trace(tmp_path / "trace", [(0, False, [[list(range(1, 2 * num_workers + 1))]])], layers))
    held = [[0], *([2 * i + 1, 2 * i + 2] for i in range(num_workers))]
    local, workers = group(study, held, ["100%"] * len(held), ClusterNetwork("slow", 1e9, 0, 0))
    expert_ns = layers[0].expert_nbytes + 10
    assert local.clock.now_ns == 100 + 24 + 2 * expert_ns + num_workers * 2 * 24 + 1000
    assert workers.sent_nbytes == num_workers * 24 and workers.received_nbytes == num_workers * 48


def test_calls_are_made_one_after_the_other(tmp_path: Path) -> None:
    """As above, but 60 ns from call to call: the last of three leaves at 3 x 24 + 2 x 60, and its answer finds the link
    free.
    """
    layers = (LayerGeometry(7, 6, 24, 10, 2, 1),)
    study = make_study(make_trace(tmp_path / "trace", [(0, False, [[list(range(1, 7))]])], layers))
    held, network = [[0], [1, 2], [3, 4], [5, 6]], ClusterNetwork("slow", 1e9, 0, 0, 60)
    local, workers = group(study, held, ["100%"] * 4, network)
    expert_ns = layers[0].expert_nbytes + 10
    assert local.clock.now_ns == 100 + 3 * 24 + 2 * 60 + 2 * expert_ns + 2 * 24 + 1000
    assert workers.network_ns == 3 * 24 + 2 * 60 + 2 * 24


def test_the_local_machine_sends_computes_and_then_takes_answers(tmp_path: Path) -> None:
    """As above, and of the 30 ns of a call 10 pass until the next can be made, and 5 for taking its answer. Who waited
    takes 7 longer. Everything is in memory.

    100   The dense part has ended. The first call leaves until 104; with 20 on the way and 25 of its cost, experts 2
          and 3 are computed from 149 until 249. Their rows reach the local link at 269 and are in at 277.
    114   The second call leaves until 118. Expert 4 is computed from 163 until 213; its row is in at 237.
    120   The local machine computes expert 0 until 170, waits for the first answer, and takes it from 277 until 282.
          The second, which has been there, it takes until 287, and is awake at 294. An infinite network ends the layer
          at 100 + 100.
    1394  The second token has experts 0, 1 and 6 here, computed from 1404 until 1554, when the answer of the second
          worker has been there since 1517. The layer ends at 1559, with an infinite network at 1394 + 150.
    """
    layers = sized(1, 7, 4, width=10)
    passes = [(0, False, [[[0, 2, 3, 4]]]), (0, False, [[[0, 1, 4, 6]]])]
    study = make_study(make_trace(tmp_path / "trace", passes, layers))
    held, network = [[0, 1, 6], [2, 3], [4, 5]], ClusterNetwork("toy", 0.5e9, 20, 30, 10, 5, 7)
    local, workers = group(study, held, ["100%"] * 3, network)
    assert local.clock.now_ns == 1559 + 1000
    assert workers.network_ns == (294 - 200) + (1559 - 1544)
    assert local.metrics.stall_ns == 0


@pytest.mark.parametrize("num_machines", [2, 3, 5])
def test_each_machine_hits_as_if_its_share_were_all(num_machines: int, tmp_path: Path) -> None:
    layers = sized(4, 20, 3)
    passes = random_passes(7, layers, 60, prompt=6, num_requests=2)
    study = make_study(make_trace(tmp_path / "trace", passes, layers, num_requests=2))
    shares = Placement(study.geometry, num_machines).shares
    network = ClusterNetwork("any", 1e9, 300, 100)
    local, _ = study.simulate_group(LRU, shares, [Memory("60%")] * num_machines, network)
    for number, (share, scheduler) in enumerate(zip(shares, local.schedulers, strict=True)):
        own = [(request, is_prefill, [held_of(share, row) for row in rows]) for request, is_prefill, rows in passes]
        own_trace = make_trace(tmp_path / str(number), own, share.geometry.layers, num_requests=2)
        alone = make_study(own_trace)
        assert alone.geometry == share.geometry
        one = alone.simulate(LRU, Memory("60%").budget(share.geometry))
        assert counted(scheduler) == counted(one.scheduler)
    hits, demands = np.sum(local.metrics.hits_by_request(), axis=0)
    of_decode = [counters.decode for scheduler in local.schedulers for counters in scheduler.counters]
    assert hits == sum(one.hits for one in of_decode) > 0 and demands == 2 * 60 * 4 * 3


def counted(scheduler: Scheduler) -> list[tuple[PhaseCounters, PhaseCounters]]:
    return [(layer.prefill, layer.decode) for layer in scheduler.counters]


def held_of(share: Share, row: list[list[int]]) -> list[list[int]]:
    """The part of a token's choices that a machine holds, by its own numbers."""
    return [
        [held.index(expert) for expert in chosen if expert in held]
        for held, chosen in zip(share.experts, row, strict=True)
    ]


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    layers = sized(1, 4, 2)
    study = make_study(make_trace(tmp_path / "trace", random_passes(3, layers, 3), layers))
    shares = Placement(study.geometry, 2).shares
    with pytest.raises(ConfigError, match="workers predict nothing"):
        study.simulate_group(SYSTEMS["fmoe"], shares, [Memory("100%")] * 2, INFINITE)
    with pytest.raises(HardwareError, match="network='wifi': no such network and no such file; accepted: 1GbE, 10GbE"):
        ClusterNetwork.read("wifi")


def test_the_shipped_networks_are_in_order_and_a_file_is_read(tmp_path: Path) -> None:
    found = [ClusterNetwork.read(name) for name in NETWORK_NAMES]
    assert [one.name for one in found] == list(NETWORK_NAMES)
    assert found == sorted(found, key=lambda one: one.nbytes_per_s)
    assert [one.latency_ns for one in found] == sorted((one.latency_ns for one in found), reverse=True)
    path = tmp_path / "own.toml"
    path.write_text('name = "own"\nnbytes_per_s = 2e9\nlatency_ns = 5000\ncall_ns = 0\n')
    assert ClusterNetwork.read(str(path)) == ClusterNetwork("own", 2e9, 5000, 0)
    path.write_text('name = "own"\nnbytes_per_s = 0\nlatency_ns = 5000\ncall_ns = 0\n')
    with pytest.raises(HardwareError, match="nbytes_per_s=0: must be a number from 1"):
        ClusterNetwork.read(str(path))
    path.write_text('name = "own"\nnbytes_per_s = 2e9\nlatency_ns = 0\ncall_ns = 5\ntake_ns = 6\n')
    with pytest.raises(HardwareError, match="take_ns=6: a part of call_ns=5"):
        ClusterNetwork.read(str(path))


def test_a_measured_machine_is_measured_for_the_whole_model(tmp_path: Path) -> None:
    """Its [compute] is of a layer with all experts, of which a machine here holds some: 100 ns of dense a layer, 50 for
    each expert of the machine that has most of the token's, 1000 for the head.
    """
    layers = sized(2, 8, 2)
    passes = random_passes(5, layers, 6)
    study = make_study(make_trace(tmp_path / "trace", passes, layers), measured())
    shares = Placement(study.geometry, 2).shares
    local, _ = study.simulate_group(LRU, shares, [Memory("100%")] * 2, INFINITE)
    most = [
        max(map(len, layer))
        for _, _, (row,) in passes
        for layer in zip(*(held_of(one, row) for one in shares), strict=True)
    ]
    assert local.clock.now_ns == sum(100 + 50 * num for num in most) + 6 * 1000
