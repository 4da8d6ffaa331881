"""A repository of GGUF files: which of them are a model, which one is chosen, and that no byte comes twice."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import constants

import expertly
from expertly.cli.main import main
from expertly.core.errors import CheckpointError, DownloadError, StoreError
from expertly.engine import cpu
from expertly.engine import fitting as module
from expertly.engine.fitting import with_quantisation
from expertly.model import hub as hub_module
from expertly.model.hub import HubModel, download
from expertly.model.needs import needs_of
from expertly.model.packing import pack_cached
from expertly.model.quantisations import find_quantisation, quantisations
from tests.families import make_checkpoint
from tests.formats.gguf_files import WORDS, load_gguf, make_gguf
from tests.model.hub import NAME, FakeHub, asked


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two quantisations beside each other, one in parts in a folder, and what is beside models."""
    folder = tmp_path_factory.mktemp("repository")
    make_gguf(folder / "Tiny-q4_0.gguf", "Q4_0", words=WORDS)
    make_gguf(folder / "Tiny-UD-Q6_K.gguf", "Q6_K", words=WORDS)
    make_gguf(folder / "Q8_0" / "Tiny-Q8_0.gguf", "Q8_0", split=17, words=WORDS)
    (folder / "mmproj-Tiny-F16.gguf").write_bytes(b"GGUF")
    (folder / "imatrix.gguf").write_bytes(b"GGUF")
    (folder / "config.json").write_text('{"model_type": "qwen3_moe"}')
    (folder / "README.md").write_text("# Tiny")
    return folder


@pytest.fixture
def hub(repository: Path, tmp_path: Path) -> Iterator[FakeHub]:
    with asked(FakeHub(repository), tmp_path) as found:
        yield found


# -- names -------------------------------------------------------------------------------------------------------------

LISTED: dict[str, tuple[list[str], list[str]]] = {
    "llama.cpp's names": (["M-Q4_K_M.gguf", "M-IQ2_XXS.gguf", "M-TQ1_0.gguf"], ["Q4_K_M", "IQ2_XXS", "TQ1_0"]),
    "small letters, points": (["m.q4_k_m.gguf", "m-f16.gguf", "m_bf16.gguf"], ["Q4_K_M", "F16", "BF16"]),
    "kinds of their own": (["M-UD-Q4_K_XL.gguf", "M-Q4_K_XL.gguf", "M.i1-Q4_K_S.gguf"], [
        "UD-Q4_K_XL", "Q4_K_XL", "I1-Q4_K_S",
    ]),
    "parts": (["M-Q2_K-00002-of-00002.gguf", "M-Q2_K-00001-of-00002.gguf", "M-mxfp4.gguf"], ["Q2_K", "MXFP4"]),
    "only the folder says it": (["Q3_K_S/m-00001-of-00001.gguf", "Q5_0/m-00001-of-00001.gguf"], ["Q3_K_S", "Q5_0"]),
    "a model's name with digits": (["Qwen3-30B-A3B-Q5_K_M.gguf"], ["Q5_K_M"]),
    "no name": (["model.gguf"], ["model.gguf"]),
    "one name of two": (["a-Q4_0.gguf", "b-Q4_0.gguf", "b-Q8_0.gguf"], ["a-Q4_0.gguf", "b-Q4_0.gguf", "Q8_0"]),
    "what is no model": (
        ["mmproj-F16.gguf", "M-mmproj-BF16.gguf", "imatrix.gguf", "M-imatrix.gguf", "M.imatrix.gguf_file", "a.bin"],
        [],
    ),
    "quantised by an imatrix": (["M-imatrix-Q4_K_M.gguf"], ["Q4_K_M"]),
}  # fmt: skip


@pytest.mark.parametrize("case", LISTED)
def test_a_file_is_the_quantisation_that_its_name_says(case: str) -> None:
    files, names = LISTED[case]
    found = quantisations({file: number for number, file in enumerate(files)})
    assert {one.name for one in found} == set(names) and not any(one.problem for one in found)


FILES = {
    "M-Q4_K_M.gguf": 4,
    "M-UD-Q5_K_XL.gguf": 5,
    "other/N-Q6_K.gguf": 6,
    "M-Q6_K.gguf": 6,
    **{f"big/M-Q8_0-{part:05d}-of-00003.gguf": 8 for part in (1, 2, 3)},
    "M-BF16-00001-of-00002.gguf": 16,
}


@pytest.mark.parametrize(
    ("tag", "first"),
    [
        ("q4_k_m", "M-Q4_K_M.gguf"),
        ("Q5_K_XL", "M-UD-Q5_K_XL.gguf"),
        ("M-Q6_K", "M-Q6_K.gguf"),
        ("other/N-Q6_K.gguf", "other/N-Q6_K.gguf"),
        ("Q8_0", "big/M-Q8_0-00001-of-00003.gguf"),
    ],
)
def test_a_tag_names_one(tag: str, first: str) -> None:
    found = find_quantisation("x", FILES, tag)
    assert next(iter(found.files)) == first and len(found.files) == (3 if tag == "Q8_0" else 1)


@pytest.mark.parametrize(
    ("tag", "said"),
    [
        ("Q3_K", "no such quantisation; accepted behind a colon: Q4_K_M, UD-Q5_K_XL, M-Q6_K.gguf, other/N-Q6_K"),
        ("Q4_K", "no such quantisation"),
        ("Q6_K", "several have that; accepted behind a colon: M-Q6_K.gguf, other/N-Q6_K.gguf"),
        ("BF16", "part 2 of 2 is not there"),
        ("", "name a quantisation"),
    ],
)
def test_a_tag_that_names_none_is_refused(tag: str, said: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(said)):
        find_quantisation("x", FILES, tag)


# -- downloads ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [f"{NAME}:Q8_0", f"hf.co/{NAME}:q8_0", f"https://huggingface.co/{NAME}:Tiny-Q8_0"])
def test_a_quantisation_in_parts_writes_the_tokens_of_its_files(hub: FakeHub, repository: Path, name: str) -> None:
    model, tokenizer = expertly.load(name, memory="50%")
    assert tokenizer is not None
    whole = load_gguf(make_gguf(repository.parent / "whole.gguf", "Q8_0", words=WORDS))
    inputs = torch.tensor([[5, 6, 7]])
    mine, theirs = (one.generate(inputs, max_new_tokens=12, do_sample=False) for one in (model, whole))
    assert mine.tolist() == theirs.tolist()
    expertly.unload(model)
    parts = [file for file in hub.downloads if file.endswith(".gguf")]
    assert sorted(parts) == sorted(path.name for path in repository.glob("Q8_0/*.gguf")) and len(parts) > 2
    hub.is_down = True
    expertly.unload(expertly.load(name, memory="50%")[0])


@pytest.mark.parametrize("is_ended", [False, True])
def test_what_came_before_a_download_broke_off_does_not_come_again(
    hub: FakeHub, repository: Path, is_ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection ends twice; or the hub does, and whoever asked tries again when it is back."""
    file = repository / "Tiny-UD-Q6_K.gguf"
    half, quarter = 4 << 20, 2 << 20
    hub.cut_after, hub.fails_after_cut = [half] if is_ended else [half, quarter], is_ended
    if is_ended:
        with pytest.raises(DownloadError, match="the hub answers 503"):
            download(f"{NAME}:Q6_K")
        hub.is_down = False
        left = file.stat().st_size - half
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=left))
    assert download(f"{NAME}:Q6_K").read_bytes() == file.read_bytes()
    expected = [half] if is_ended else [half, half + quarter]
    assert hub.ranges == [(file.name, begin) for begin in expected]
    assert not list(Path(constants.HF_HUB_CACHE).rglob("*.incomplete"))


def test_a_beginning_of_something_else_is_not_gone_on_from(hub: FakeHub, repository: Path) -> None:
    file = repository / "Tiny-UD-Q6_K.gguf"
    found = HubModel.find(NAME)
    begun = Path(constants.HF_HUB_CACHE, "models--maker--model", "blobs", f"{found.sha256[file.name]}.incomplete")
    begun.parent.mkdir(parents=True)
    for content in (b"x" * 1000, b"x" * (file.stat().st_size + 1)):
        begun.write_bytes(content)
        if len(content) == 1000:
            with pytest.raises(DownloadError, match="was damaged; download it again"):
                download(f"{NAME}:Q6_K")
            begun.write_bytes(content)
    assert download(f"{NAME}:Q6_K").read_bytes() == file.read_bytes()
    target = begun.parent.parent / "mine"
    target.write_text("mine")
    shutil.rmtree(begun.parent.parent / "snapshots")
    next(iter(begun.parent.iterdir())).unlink()
    begun.symlink_to(target)
    with pytest.raises(DownloadError, match="could not be downloaded"):
        download(f"{NAME}:Q6_K")
    assert target.read_text() == "mine"


def test_the_disk_must_hold_the_quantisation_and_its_store(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    nbytes = 2 * (hub.folder / "Tiny-q4_0.gguf").stat().st_size
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=nbytes - 1))
    with pytest.raises(StoreError, match=f"{nbytes} more bytes are needed to download and pack {NAME}"):
        pack_cached(f"{NAME}:Q4_0")
    assert not hub.sent_nbytes


def test_a_store_outlives_its_download(hub: FakeHub, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stores = {tag: pack_cached(f"{NAME}:{tag}").folder for tag in ("Q4_0", "Q6_K")}
    shutil.rmtree(tmp_path / "hf")
    hub.sent_nbytes = 0
    assert {tag: pack_cached(f"{NAME}:{tag}").folder for tag in stores} == stores
    assert with_quantisation(NAME) in map(str, stores.values()) and not hub.sent_nbytes
    hub.is_down = True
    with pytest.raises(DownloadError, match="answers 503"):
        pack_cached(f"{NAME}:Q8_0")


def test_an_ordinary_model_has_no_quantisation(tmp_path: Path) -> None:
    make_checkpoint("qwen3_moe", tmp_path / "model")
    with asked(FakeHub(tmp_path / "model"), tmp_path):
        with pytest.raises(CheckpointError, match="no such quantisation; accepted behind a colon: none"):
            pack_cached(f"{NAME}:Q4_0")
        assert with_quantisation(NAME) == NAME


# -- without a download ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tag", ["Q4_0", "Q8_0"])
@pytest.mark.parametrize("head_nbytes", [1 << 8, 1 << 20])
def test_needs_are_those_of_the_files_and_headers_alone_are_read(
    hub: FakeHub, repository: Path, tag: str, head_nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_module, "_HEAD_NBYTES", head_nbytes)
    first = min(repository.rglob(f"*{tag}*.gguf" if tag == "Q8_0" else "*q4_0.gguf"))
    here, there = needs_of(str(first)), needs_of(f"{NAME}:{tag}")
    assert replace(there, name=here.name, stored=here.stored) == here
    assert there.stored is not None and here.stored is not None
    assert (there.stored.nbytes, there.stored.is_here) == (here.stored.nbytes, False)
    assert not [name for name in hub.downloads if name.endswith(".gguf")]
    if head_nbytes < 1000:
        assert len(hub.ranges) > 1 and hub.sent_nbytes < first.stat().st_size / 2


def test_what_is_no_gguf_file_is_named(hub: FakeHub, repository: Path, tmp_path: Path) -> None:
    hub.folder = tmp_path / "other"
    hub.folder.mkdir()
    (hub.folder / "T-Q4_0.gguf").write_bytes(b"GGUF" + b"\0" * 5000)
    for use in (needs_of, with_quantisation, pack_cached):
        with pytest.raises(CheckpointError, match=r"T-Q4_0.gguf: version=0"):
            use(f"{NAME}:Q4_0" if use is not with_quantisation else NAME)


class StrangeHub(FakeHub):
    def siblings(self) -> list[dict[str, Any]]:
        return [one | {"rfilename": f"../{one['rfilename']}"} for one in super().siblings()]


def test_names_that_lead_elsewhere_are_none(repository: Path, tmp_path: Path) -> None:
    with asked(StrangeHub(repository), tmp_path), pytest.raises(CheckpointError, match="accepted behind a colon: none"):
        download(f"{NAME}:Q4_0")


# -- which one is chosen -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fitting", "kept", "chosen"),
    [
        ("Q8_0", "", "Q8_0"),
        ("UD-Q6_K", "", "UD-Q6_K"),
        ("half of Q4_0", "", "Q4_0"),
        ("Q8_0", "Q4_0", "Q4_0"),  # nothing is downloaded where one is here
    ],
)
def test_the_largest_that_fits_is_chosen_and_said(
    hub: FakeHub,
    fitting: str,
    kept: str,
    chosen: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(module, "rss_nbytes", lambda: 0)
    needs = needs_of(f"{NAME}:{fitting.rpartition(' ')[2]}")
    experts = needs.experts_nbytes // (2 if "half" in fitting else 1)
    memory = experts - module.left_for_experts(needs, 0, runs_on_host=True)
    if "half" in fitting:
        assert with_quantisation(NAME, total_memory=memory) == f"{NAME}:{chosen}"
        caplog.clear()
    monkeypatch.setattr(cpu, "available_host_nbytes", lambda: memory)
    if kept:
        download(f"{NAME}:{kept}")
    assert main(["pack", NAME, "--json"]) == 0
    source, line = json.loads(capsys.readouterr().out)["source"], "".join(caplog.messages)
    part = r", 50.0% of its experts in memory" if "half" in fitting else ""
    size = rf"\(\d\S* MiB{part}\)"
    assert re.fullmatch(rf"{NAME}: chose {chosen} {size} of Q4_0, UD-Q6_K, Q8_0; name another with :TAG", line)
    assert chosen.lower() in source.lower()
    assert len({re.sub("-0.*", "", name) for name in hub.downloads if name.endswith(".gguf")}) == 1


def test_a_quantisation_that_cannot_be_read_is_not_chosen(hub: FakeHub, repository: Path, tmp_path: Path) -> None:
    hub.folder = tmp_path / "other"
    hub.folder.mkdir()
    shutil.copy(repository / "Tiny-q4_0.gguf", hub.folder)
    (hub.folder / "Tiny-IQ1_S.gguf").write_bytes(b"GGUF" + b"\0" * 5000)
    (hub.folder / "Tiny-BF16.gguf").write_bytes(b"GGUF" + b"\0" * (20 << 20))
    assert with_quantisation(NAME) == f"{NAME}:Q4_0"
