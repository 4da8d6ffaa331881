"""What is measured of a tiny model: everything is there, makes sense, and is a hardware file afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import expertly
from expertly.core.errors import ConfigError, ModelUseError
from expertly_lab.model_profile import measure_model
from expertly_lab.sim.hardware import Hardware
from tests.engine.conftest import Cases


def test_six_numbers_are_measured_and_are_a_file(cases: Cases, tmp_path: Path):
    model, _ = expertly.load(str(cases["mixtral"].store), device="cpu", memory="60%", system="lru:segments=4")
    result = measure_model(model, seconds=0)
    expertly.unload(model)
    assert result.expert_nbytes_per_s > 0 and result.link.nbytes_per_s > 0
    assert min(result.link.latency_ns, result.layer_ns, result.head_ns, result.miss_ns) >= 0
    result.write(tmp_path / "here.toml")
    assert Hardware.read(str(tmp_path / "here.toml")) == result


def test_the_model_still_works_and_is_consistent(cases: Cases):
    case = cases["qwen2_moe"]
    model, _ = expertly.load(str(case.store), device="cpu", memory="60%", system="lfu")
    measure_model(model, seconds=0.1)
    prompt = torch.tensor([case.prompts[0]])
    out = model.generate(prompt, max_new_tokens=4, do_sample=False)
    assert out[0, prompt.shape[1] :].tolist() == case.tokens[0][:4]
    expertly.unload(model)


def test_a_model_whose_experts_all_stay_is_refused(cases: Cases):
    model, _ = expertly.load(str(cases["mixtral"].store), device="cpu", memory="100%", system="resident")
    with pytest.raises((ConfigError, ModelUseError), match="all experts stay in it"):
        measure_model(model, seconds=0)
    expertly.unload(model)
