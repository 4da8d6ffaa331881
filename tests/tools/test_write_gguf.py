"""tools/write_gguf.py: the same bits under llama.cpp's names."""

from __future__ import annotations

import json
import re
from pathlib import Path

import gguf
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from expertly.data import demo_folder
from tools import write_gguf

DEMO = demo_folder()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first two layers of the demo model."""
    folder = tmp_path_factory.mktemp("models") / "demo"
    folder.mkdir()
    config = json.loads((DEMO / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    with safe_open(DEMO / "model.safetensors", "pt") as file:
        names = [name for name in file.keys() if not re.match(r"model\.layers\.([2-9]|\d\d)\.", name)]  # noqa: SIM118
        save_file({name: file.get_tensor(name) for name in names}, folder / "model.safetensors")
    return folder


def test_bits_are_those_of_the_checkpoint(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "demo.gguf"
    assert write_gguf.main([str(model), str(out)]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["demo.gguf"]
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(out).tensors}
    with safe_open(DEMO / "model.safetensors", "pt") as file:
        down = file.get_tensor("model.layers.1.mlp.experts.7.down_proj.weight")
        norm = file.get_tensor("model.layers.1.input_layernorm.weight")
    stacked = tensors["blk.1.ffn_down_exps.weight"]
    assert list(stacked.shape) == [64, 256, 32], "I, H, E: the fastest first"
    written = torch.from_numpy(stacked.data.copy()).view(torch.bfloat16).view(32, 256, 64)
    assert torch.equal(written[7], down)
    assert torch.equal(torch.from_numpy(tensors["blk.1.attn_norm.weight"].data.copy()), norm.float())


@pytest.mark.parametrize(("field", "value"), [("model_type", "mixtral"), ("norm_topk_prob", False)])
def test_what_would_be_wrong_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], field: str, value: object
) -> None:
    config = json.loads((DEMO / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {field: value}))
    assert write_gguf.main([str(tmp_path), str(tmp_path / "out.gguf")]) == 2
    assert f"{field} is {value!r}; accepted: qwen3_moe" in capsys.readouterr().err
    assert not (tmp_path / "out.gguf").exists()
