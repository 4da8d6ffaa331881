"""Packing: the store holds, bit for bit, what transformers loads, and takes little memory to make."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from expertly.core.errors import CheckpointError, ConfigError
from expertly.model.packing import default_dtype, pack
from expertly.store.checkpoint import Checkpoint
from expertly.store.packed import DENSE_NAME
from tests import every_family
from tests.families import FAMILIES, NUM_EXPERTS, make_checkpoint, make_model
from tests.model.checkpoints import (
    assert_holds_what_transformers_loads,
    change,
    make_fused_checkpoint,
    read_experts,
    read_tensors,
    refused,
    set_config,
    write_checkpoint,
)


@pytest.mark.parametrize(
    ("family", "max_shard_size"), [*((name, None) for name in FAMILIES), ("qwen3_moe", "20KB"), ("gpt_oss", "20KB")]
)
def test_holds_what_transformers_loads(tmp_path: Path, family: str, max_shard_size: str | None) -> None:
    source = make_checkpoint(family, tmp_path / "source", max_shard_size=max_shard_size)
    store = pack(source, tmp_path / "store")
    assert len(store.manifest.layers) == FAMILIES[family].num_moe_layers
    assert {layer.num_experts for layer in store.manifest.layers} == {NUM_EXPERTS}
    assert (store.manifest.model_type, store.manifest.dtype) == (family, "float32")
    store.verify()
    assert_holds_what_transformers_loads(store, source)


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "granitemoe", "gpt_oss"])
def test_a_fused_checkpoint_makes_the_same_experts(tmp_path: Path, family: str) -> None:
    source = make_fused_checkpoint(family, tmp_path / "source")
    store = pack(source, tmp_path / "store")
    assert_holds_what_transformers_loads(store, source)
    other = pack(tmp_path / "source-source", tmp_path / "other")
    for layer in range(len(store.manifest.layers)):
        assert torch.equal(read_experts(store, layer), read_experts(other, layer))


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
def test_casts_as_transformers_does(tmp_path: Path, stored: torch.dtype) -> None:
    source = make_checkpoint("qwen3_moe", tmp_path / "source", dtype=stored)
    assert pack(source, tmp_path / "default").manifest.dtype == str(stored).removeprefix("torch.")
    for dtype in ("bfloat16", "float16", "float32"):
        store = pack(source, tmp_path / dtype, dtype)
        assert store.manifest.dtype == dtype
        assert_holds_what_transformers_loads(store, source, dtype=getattr(torch, dtype))


def test_float16_is_refused_where_a_weight_does_not_fit(tmp_path: Path) -> None:
    source = make_checkpoint("qwen3_moe", tmp_path / "source")
    change(
        source, lambda name, tensor: tensor.index_fill(0, torch.tensor([0]), 1e6) if "experts.2.up" in name else tensor
    )
    refused(source, ConfigError, r"dtype='float16': expert 2 of .*mlp\.experts holds 1e\+06, .* 65504", "float16")
    pack(source, tmp_path / "store", "bfloat16")


def test_nan_and_infinity_are_weights_like_others(tmp_path: Path) -> None:
    source = make_checkpoint("qwen3_moe", tmp_path / "source")
    values = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0])

    def damage(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if "experts.1.down" in name:
            tensor.view(-1)[:4] = values
        return tensor

    change(source, damage)
    assert_holds_what_transformers_loads(pack(source, tmp_path / "store"), source)
    assert read_experts(pack(source, tmp_path / "half", "float16"), 0).isnan().any()


def pack_and_tell(source: Path, folder: Path, warm: Path, quantize: str | None) -> None:
    """Writes beside the store by how many bytes this process has grown."""

    def status(key: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))

    pack(warm, folder.with_name("warm"), quantize=quantize)  # all that is imported late, and all pages of a small model
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    pack(source, folder, quantize=quantize)
    folder.with_name("grown").write_text(str(status("VmHWM") - before))


def test_packing_needs_little_memory(tmp_path: Path, imported: Any) -> None:
    """A dense tensor and a layer of experts larger than all the memory that packing may add."""
    model = make_model("qwen3_moe")
    config = model.config
    config.vocab_size, config.hidden_size, config.moe_intermediate_size = 24_000, 1024, 256
    config.num_hidden_layers, config.num_experts, config.dtype = 1, 32, "bfloat16"
    config.tie_word_embeddings = True
    with torch.device("meta"):
        shapes = {name: tuple(t.shape) for name, t in type(model)(config).state_dict().items()}
    del shapes["lm_head.weight"]
    source = tmp_path / "source"
    config.save_pretrained(source)
    save_file(
        {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()},
        source / "model.safetensors",
        {"format": "pt"},
    )
    family = FAMILIES["qwen3_moe"]
    family = replace(family, config=family.config | {"hidden_size": 128, "moe_intermediate_size": 128})
    warm = make_checkpoint(family, tmp_path / "warm", dtype=torch.bfloat16)
    for quantize in (None, "mxfp4"):
        name = str(quantize)
        (tmp_path / name).mkdir()
        process = imported.Process(target=pack_and_tell, args=(source, tmp_path / name / "store", warm, quantize))
        process.start()
        process.join()
        assert process.exitcode == 0
        assert int((tmp_path / name / "grown").read_text()) < 40 << 20, name  # of 49 MB dense and 50 MB of experts


# -- bad checkpoints, which are refused by name and leave nothing behind -----------------------------------------------


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints to be copied and spoiled, by how they hold their experts."""
    folder = tmp_path_factory.mktemp("layouts")
    return {
        "per expert": make_checkpoint("qwen3_moe", folder / "qwen3_moe"),
        "fused": make_fused_checkpoint("qwen3_moe", folder / "fused"),
    }


@pytest.fixture(autouse=True)
def nothing_is_begun(tmp_path: Path) -> Iterator[None]:
    """All of this is found before anything is written."""
    yield
    assert not list(tmp_path.glob("*.partial"))


@pytest.fixture
def source(tmp_path: Path, layouts: dict[str, Path]) -> Path:
    return Path(shutil.copytree(layouts["per expert"], tmp_path / "source"))


def test_the_dtype_is_the_config_s_or_that_of_most_bytes(tmp_path: Path) -> None:
    source = make_checkpoint("qwen3_moe", tmp_path / "source", dtype=torch.bfloat16)
    assert default_dtype(Checkpoint.open(source)) == "bfloat16"
    for fields, expected in (
        ({"dtype": "float16"}, "float16"),
        ({"dtype": None, "torch_dtype": "torch.float32"}, "float32"),
        ({"dtype": None, "torch_dtype": None}, "bfloat16"),
        ({"torch_dtype": None, "text_config": {"dtype": "float16"}}, "float16"),
    ):
        set_config(source, **fields)
        assert default_dtype(Checkpoint.open(source)) == expected


LAYOUTS = ("per expert", "fused")


@pytest.mark.parametrize("num_experts", [NUM_EXPERTS - 1, NUM_EXPERTS + 1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_expert_count_that_disagrees_is_named(
    tmp_path: Path, layouts: dict[str, Path], layout: str, num_experts: int
) -> None:
    source = Path(shutil.copytree(layouts[layout], tmp_path / "source"))

    def cut_router(name: str, tensor: torch.Tensor) -> torch.Tensor:
        is_router = name.endswith("gate.weight")
        return tensor[:1].expand(num_experts, -1) if is_router else tensor

    change(source, cut_router)
    is_named = "num_local_experts" in (source / "config.json").read_text()
    set_config(source, **{"num_local_experts" if is_named else "num_experts": num_experts})
    refused(source, CheckpointError, rf"config\.json says {num_experts}")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_of_another_shape_than_the_config_s_are_named(
    tmp_path: Path, layouts: dict[str, Path], layout: str
) -> None:
    source = Path(shutil.copytree(layouts[layout], tmp_path / "source"))
    set_config(source, moe_intermediate_size=24)
    refused(source, CheckpointError, r"tensor '.*expert.*' \(\[.*\]\): makes .* of shape .* but config\.json says")


Change = Callable[[torch.Tensor], torch.Tensor | None]


@pytest.mark.parametrize(
    ("part", "changed", "message"),
    [
        ("layers.2.mlp.experts", lambda value: None, r"no tensor for model\.layers\.2\.mlp\.experts\.gate_up_proj"),
        (".up_proj", lambda value: value[:, :-1], r"cannot be made into model\.layers\.0\.mlp\.experts\.gate_up_proj"),
        ("experts", lambda value: value.to(torch.int8), r"experts\.0\.gate_proj\.weight': dtype='I8': .* must be BF16"),
        ("lm_head.weight", lambda value: value[:-1], r"'lm_head\.weight': .*\[127, 32\].* config\.json .*\[128, 32\]"),
    ],
)
def test_a_tensor_that_is_not_as_it_should_be_is_named(source: Path, part: str, changed: Change, message: str) -> None:
    change(source, lambda name, tensor: changed(tensor) if part in name else tensor)
    refused(source, CheckpointError, message)


def test_buffers_that_the_model_computes_may_be_absent(tmp_path: Path) -> None:
    """As in Qwen3.8-Flash-Next's own checkpoint: transformers computes those of the n-grams from its config."""
    every_family.make_model("qwen4_exp_text").save_pretrained(folder := tmp_path / "checkpoint")
    whole = pack(folder, tmp_path / "whole")
    change(folder, lambda name, tensor: tensor if tensor.is_floating_point() else None)
    store = pack(folder, tmp_path / "store")
    with safe_open(whole.folder / DENSE_NAME, "pt") as expected, safe_open(store.folder / DENSE_NAME, "pt") as dense:
        assert {*dense.keys()} == {*expected.keys()}
        buffers = [name for name in dense.keys() if not dense.get_tensor(name).is_floating_point()]  # noqa: SIM118
        assert len(buffers) == 3
        assert all(torch.equal(dense.get_tensor(name), expected.get_tensor(name)) for name in buffers)


def test_an_absent_buffer_that_only_the_checkpoint_has_is_named(tmp_path: Path) -> None:
    """DeepSeek-V4's experts of each token, which transformers would make zeros."""
    every_family.make_model("deepseek_v4").save_pretrained(folder := tmp_path / "checkpoint")
    pack(folder, tmp_path / "whole")
    change(folder, lambda name, tensor: None if name.endswith("tid2eid") else tensor)
    refused(folder, CheckpointError, r"no tensor for model\.layers\.0\.mlp\.gate\.tid2eid")


def test_tensors_that_transformers_ignores_are_left_out(source: Path, tmp_path: Path) -> None:
    tensors = read_tensors(source) | {"model.layers.9.mlp.experts.0.up_proj.weight": torch.ones(16, 32)}
    extended = write_checkpoint(tmp_path / "extended", tensors, source)
    store = pack(extended, tmp_path / "store")
    assert not [name for name in store.dense if "layers.9" in name]
    assert_holds_what_transformers_loads(store, extended)
