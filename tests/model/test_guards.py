"""What else people do with a model: works, is shared, or says why not; never silently wrong."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from transformers import CompileConfig, ContinuousBatchingConfig

from expertly.core.errors import ModelUseError
from expertly.model.batching import bounded_config
from tests.families import generate, logits_of, make_prompts
from tests.model.conftest import Toys

Model = Any


@pytest.fixture(scope="module")
def model(toys: Toys) -> Model:
    return toys["mixtral"].model


def test_writing_it_is_refused(model: Model, tmp_path: Any) -> None:
    with pytest.raises(ModelUseError, match="without them"):
        model.save_pretrained(tmp_path / "saved")
    with pytest.raises(ModelUseError, match="without them"):
        model.push_to_hub("nobody/nothing")
    for write in (pickle.dumps, lambda value: torch.save(value, io.BytesIO()), copy.copy, copy.deepcopy):
        with pytest.raises(ModelUseError, match="copying and pickling"):
            write(model)
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize(
    "move",
    [
        lambda model: model.half(),
        lambda model: model.share_memory(),
        lambda model: model.to(torch.bfloat16),
        lambda model: model.to("meta"),
        lambda model: model.to(dtype=torch.float16, device="cpu"),
        lambda model: model.to(memory_format=torch.channels_last),
        lambda model: model.cuda("cuda:0"),
        lambda model: model.to_empty(device="cpu"),
        lambda model: model.type(torch.float16),
    ],
)
def test_another_device_or_dtype_is_refused_and_changes_nothing(move: Any, model: Model) -> None:
    before = {name: (tensor.dtype, tensor.device, tensor.data_ptr()) for name, tensor in model.state_dict().items()}
    with pytest.raises(ModelUseError, match="load the model again"):
        move(model)
    after = {name: (tensor.dtype, tensor.device, tensor.data_ptr()) for name, tensor in model.state_dict().items()}
    assert before == after


def test_the_same_device_and_dtype_are_no_change(model: Model) -> None:
    cpu, float32 = torch.device("cpu"), torch.float32
    moved = model.to("cpu"), model.to(float32), model.to(cpu, float32), model.to(torch.zeros(1)), model.to(device="cpu")
    assert all(same is model for same in (*moved, model.float(), model.cpu(), model.eval()))


def test_nothing_is_compiled(toys: Toys) -> None:
    toy, prompts = toys["mixtral"], make_prompts(1)
    with pytest.raises(ModelUseError, match="compile"):
        toy.model.compile()
    everywhere = CompileConfig(backend="eager")
    everywhere._compile_all_devices = True
    settings: dict[str, Any] = {"cache_implementation": "static", "compile_config": everywhere}
    assert generate(toy.model, prompts, 6, **settings) == generate(toy.reference, prompts, 6)
    assert not hasattr(toy.model, "_compiled_call")


def test_torch_compile_around_it_leaves_the_stacks_uncompiled(toys: Toys) -> None:
    toy = toys.fresh("mixtral")
    ids = torch.tensor(make_prompts(1))
    expected = logits_of(toy.model, make_prompts(1))
    num_calls = toy.runtime.num_calls
    with torch.no_grad():
        assert torch.equal(torch.compile(toy.model, backend="eager")(ids).logits, expected)
    torch.compiler.reset()
    assert toy.runtime.num_calls == num_calls + 3, "each layer once, and none while tracing"


def test_continuous_batching_is_bounded_and_uncaptured(model: Model) -> None:
    limits = {"num_blocks": 7, "max_batch_tokens": 33}
    config = bounded_config(ContinuousBatchingConfig(**limits))
    assert (config.num_blocks, config.max_batch_tokens, config.use_cuda_graph) == (7, 33, False)
    for wrong, problem in (
        ({}, "accepted: one with num_blocks and max_batch_tokens"),
        (limits | {"use_cuda_graph": True}, "use_cuda_graph"),
        (limits | {"decode_compile_config": CompileConfig()}, "compile_config"),
    ):
        with pytest.raises(ModelUseError, match=problem):
            model.init_continuous_batching(continuous_batching_config=ContinuousBatchingConfig(**wrong))
