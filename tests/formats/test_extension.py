"""An installed distribution adds an architecture of GGUF files, and a layout, by one file (docs/extending.md)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from expertly.core.errors import CheckpointError, ConfigError
from expertly.formats import extension
from expertly.model.packing import pack
from tests.families import make_checkpoint
from tests.formats.gguf_models import CASES, make_model, write_model
from tests.formats.references import assert_is_the_same
from tests.model.checkpoints import refused, set_config

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"


def example(title: str) -> str:
    """The page's code block with that title."""
    begin = PAGE.read_text().partition(f'title="{title}"\n')[2]
    return begin.partition("```")[0]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of the import path with a distribution that has the page's entry points."""
    folder = tmp_path / "site"
    about = folder / "mine-1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1\n")
    entries = "mixlike = my_formats:MIXLIKE\nhalved = my_formats:Halved\nbroken = my_formats:Nothing\n"
    (about / "entry_points.txt").write_text(f"[expertly.formats]\n{entries}")
    (folder / "my_formats.py").write_text(example("my_formats.py"))
    monkeypatch.syspath_prepend(folder)
    extension.cache_clear()
    yield folder
    extension.cache_clear()
    sys.modules.pop("my_formats", None)


@pytest.mark.usefixtures("installed")
def test_its_architecture_runs(tmp_path: Path) -> None:
    model = make_model(CASES["olmoe"])
    path = write_model(tmp_path / "model.gguf", model, CASES["olmoe"])
    raw = path.read_bytes()
    refused(renamed(path, raw, b"olmoX"), CheckpointError, "general.architecture='olmoX': accepted")
    assert_is_the_same(renamed(path, raw, b"mixlike"), model, tmp_path / "store")


def renamed(path: Path, raw: bytes, name: bytes) -> Path:
    """The file with another architecture's name."""
    import gguf

    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(path.with_name(f"{name.decode()}.gguf"), name.decode())
    for key, field in reader.fields.items():
        if key.startswith(("GGUF.", "general.")):
            continue
        writer.add_key_value(key.replace("olmoe.", f"{name.decode()}."), field.contents(), field.types[0])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    return path.with_name(f"{name.decode()}.gguf")


@pytest.mark.usefixtures("installed")
def test_its_layout_is_decoded(tmp_path: Path) -> None:
    source = make_checkpoint("qwen3_moe", tmp_path / "source")
    expected = load_file(source / "model.safetensors")
    halved = {}
    for name, tensor in expected.items():
        is_expert = ".experts." in name
        halved |= {f"{name}_half": tensor / 2} if is_expert else {name: tensor}
    save_file({name: tensor.contiguous() for name, tensor in halved.items()}, source / "model.safetensors")
    set_config(source, quantization_config={"quant_method": "halved"})
    store = pack(source, tmp_path / "store")
    plain = make_checkpoint("qwen3_moe", tmp_path / "plain")
    same = pack(plain, tmp_path / "plain store")
    assert [path.read_bytes() for path, *_ in store.extents] == [path.read_bytes() for path, *_ in same.extents]


@pytest.mark.usefixtures("installed")
def test_what_cannot_be_loaded_says_so(tmp_path: Path) -> None:
    source = make_checkpoint("qwen3_moe", tmp_path / "source")
    set_config(source, quantization_config={"quant_method": "broken"})
    with pytest.raises(ConfigError, match="format='broken': my_formats:Nothing cannot be loaded"):
        pack(source, tmp_path / "store")
