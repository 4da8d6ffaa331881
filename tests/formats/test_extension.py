"""An installed distribution adds an architecture of GGUF files, and a layout, by one file (docs/extending.md)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from expertly.core.errors import CheckpointError, ConfigError
from expertly.formats import extension
from expertly.model.packing import pack
from tests.families import make_checkpoint
from tests.formats.gguf_models import CASES, make_model, write_model
from tests.formats.references import assert_is_the_same
from tests.formats.test_layouts import assert_holds, changed, fp8
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
    entries = PAGE.read_text().partition('"expertly.formats"]\n')[2].partition("\n\n")[0].replace('"', "")
    (about / "entry_points.txt").write_text(f"[expertly.formats]\n{entries}\nbroken = my_format:Nothing\n")
    for name in ("my_format", "my_architecture"):
        (folder / f"{name}.py").write_text(example(f"{name}.py"))
    monkeypatch.syspath_prepend(folder)
    extension.cache_clear()
    yield folder
    extension.cache_clear()
    for name in ("my_format", "my_architecture"):
        sys.modules.pop(name, None)


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
def test_its_layout_keeps_the_bytes_and_the_tokens(tmp_path: Path) -> None:
    endings = ".fp8", ".fp8_scale", ".input_scale"
    source, plain = changed(tmp_path / "model", lambda one: fp8(one, *endings, rows=True), {"quant_method": "scaled"})
    store = pack(source, tmp_path / "store")
    assert store.manifest.stored_as == "fp8_rows"
    assert_holds(store, source, plain)


@pytest.mark.usefixtures("installed")
def test_what_cannot_be_loaded_says_so(tmp_path: Path) -> None:
    source = make_checkpoint("qwen3_moe", tmp_path / "source")
    set_config(source, quantization_config={"quant_method": "broken"})
    with pytest.raises(ConfigError, match="format='broken': my_format:Nothing cannot be loaded"):
        pack(source, tmp_path / "store")
