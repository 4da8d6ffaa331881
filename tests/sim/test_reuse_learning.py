"""A training part teaches `expertly` what is used again soon; other systems are told nothing of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from expertly.scheduler.presets import SYSTEMS
from expertly.sim.reuse_learning import ReuseOfTraining
from expertly.sim.schedule import Selection, make_schedule
from tests.scheduler.drive import one_token
from tests.sim.drive import make_study, make_trace, random_passes, sized

LAYERS = sized(3, 12, 2)


def test_a_training_part_teaches_once_and_only_who_asks(tmp_path: Path) -> None:
    passes = random_passes(0, LAYERS, 30, prompt=5, num_requests=10)
    trace = make_trace(tmp_path / "trace", passes, LAYERS, num_requests=10)
    geometry = make_study(trace).geometry
    learning = ReuseOfTraining(trace, make_schedule(trace, Selection(split=(7, 3))).training)
    taught = learning.of(SYSTEMS["expertly"], geometry)
    assert taught is not None and taught is learning.of(SYSTEMS["expertly"], geometry)
    assert learning.of(SYSTEMS["lru"], geometry) is None and learning.of(SYSTEMS["resident"], geometry) is None
    assert ReuseOfTraining(trace, []).of(SYSTEMS["expertly"], geometry) is None
    model = taught.copy()
    for layer in range(3):
        model.observe(one_token(layer, [0, 1]))
    used = np.zeros((3, 12))
    for _, is_prompt, rows in passes:
        for row in [] if is_prompt else rows:
            for layer, experts in enumerate(row):
                used[layer, experts] += 1
    popular = used.argmax(axis=1)
    worth = model.worth().reshape(3, 12)
    assert all(worth[layer, popular[layer]] > np.median(worth[layer]) for layer in range(3))
