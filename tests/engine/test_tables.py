"""Tables of embeddings that stay in the packed store: the numbers of a model that has them in memory, read by row."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import expertly
from expertly.api import handle
from expertly.core.errors import ConfigError, EngineClosedError, StoreError, TransferError
from expertly.engine.memory import beside_experts
from expertly.model import tables
from expertly.model.needs import needs_of
from expertly.model.packing import pack
from expertly.model.programs import NotedError, Notes
from expertly.store.packed import DENSE_NAME, PackedStore
from tests import every_family
from tests.engine.disk import Preads
from tests.engine.observe import loaded, open_files, reader_threads
from tests.engine.test_batching import run_batch
from tests.engine.test_lifecycle import exit_code_of_a_child
from tests.families import VOCAB_SIZE, generate, load_reference, logits_of, make_checkpoint, make_prompts
from tests.formats import gguf_models
from tests.formats.gguf_files import make_gguf
from tests.formats.gguf_models import CASES
from tests.waiting import until

N_GRAMS = [f"model.layers.{layer}.ple.ple_embedding.ngram_embedding" for layer in (1, 2)]
PER_LAYER = {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCAB_SIZE}
PAGE = 4096


def checkpoint(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Of Gemma 4 with its embeddings of each layer, of n-grams in two tensors, or one whose vocabulary is the table."""
    if name == "qwen3_moe":
        return make_checkpoint(name, folder, dtype=dtype)
    with pytest.MonkeyPatch.context() as patch:
        for family, more in (("gemma4_text", PER_LAYER), ("qwen4_exp_text", {"ple_layer_ids": [2, 3]})):
            patch.setitem(every_family.MORE, family, every_family.MORE[family] | more)
        every_family.make_model(name).to(dtype).save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def least(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of more than 6000 bytes is read by row."""
    monkeypatch.setattr(tables, "TABLE_NBYTES", 6000)


@contextmanager
def in_memory() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "TABLE_NBYTES", 1 << 40)
        yield


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return pack(checkpoint("qwen3_moe", tmp_path / "checkpoint"), tmp_path / "store").folder


def paths(folder: Path) -> list[str]:
    return [table.path for table in tables.tables_of(PackedStore.open(folder))[0]]


def answers(model: Any, *, batches: bool) -> list[Any]:
    prompts = make_prompts(2, length=14)
    repeats = [make_prompts(1, length=6)[0] * 3]
    made = [logits_of(model, prompts), generate(model, prompts, 10)]
    made.append(generate(model, repeats, 12))  # of one prompt, by programs
    if batches:
        made.append(generate(model, repeats, 12, prompt_lookup_num_tokens=4))
        made.append(run_batch(model, prompts))
    return made


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("gemma4_text", ["model.embed_tokens_per_layer"]),
        ("qwen4_exp_text", ["model.embed_tokens", *N_GRAMS]),
        ("qwen3_moe", ["model.embed_tokens"]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_and_tokens_are_those_of_the_table_in_memory(
    family: str, expected: list[str], dtype: torch.dtype, tmp_path: Path
) -> None:
    """Prompts, decode, drafts and continuous batching, bit for bit; the store keeps float32 where that is computed in
    bfloat16.
    """
    folder = checkpoint(family, tmp_path / "checkpoint")
    kept = pack(folder, tmp_path / "store", str(dtype).removeprefix("torch.")).folder
    assert paths(kept) == expected
    batches = family != "qwen4_exp_text"  # whose state cannot be taken back
    with in_memory(), loaded(kept) as whole:
        same = answers(whole, batches=batches)
    with loaded(kept) as model:
        assert [name for name, it in model.named_modules() if reads_rows(it)] == expected
        read = answers(model, batches=batches)
    assert torch.equal(read[0], same[0]) and read[1:] == same[1:]
    if dtype == torch.float32:
        assert read[1] == generate(load_reference(folder), make_prompts(2, length=14), 10)


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    ],
    ids=["fp8", "modelopt"],
)
@pytest.mark.parametrize("is_read_by_row", [True, False])
def test_a_table_in_fp8_whose_parts_share_a_scale(
    quantization: dict[str, Any], *, is_read_by_row: bool, tmp_path: Path
) -> None:
    """As Qwen3.8-Flash-Next has its n-grams. By row they have a byte a number; in memory they are decoded."""
    folder = checkpoint("qwen4_exp_text", tmp_path / "checkpoint")
    shutil.copytree(folder, decoded := tmp_path / "decoded")
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    values = dict(tensors)
    for name in [name for name in tensors if ".shard_" in name]:
        layer = int(name.split(".")[2])
        scale = torch.tensor([0.01 * (1 + layer)], dtype=torch.bfloat16)
        tensors[name] = (tensors[name] / scale.float()).to(torch.float8_e4m3fn)
        tensors[f"{name.partition('.shard_')[0]}.weight_scale"] = scale
        values[name] = tensors[name].float() * scale.float()
    save_file(tensors, path, {"format": "pt"})
    save_file(values, decoded / path.name, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))

    with nullcontext() if is_read_by_row else in_memory():
        kept = pack(folder, tmp_path / "store").folder
        found = [table for table in tables.tables_of(PackedStore.open(kept))[0] if table.path in N_GRAMS]
        assert [table.path for table in found] == (N_GRAMS if is_read_by_row else [])
        assert all(table.nbytes == table.num_units * table.num_columns for table in found)
        assert needs_of(str(folder)).tables_nbytes == needs_of(str(kept)).tables_nbytes
        prompts = make_prompts(2, length=14)
        with loaded(kept) as model, loaded(pack(decoded, tmp_path / "decoded_store").folder) as same:
            assert torch.equal(logits_of(model, prompts), logits_of(same, prompts))
            assert generate(model, prompts, 10) == generate(load_reference(decoded), prompts, 10)
    if is_read_by_row:
        with in_memory(), pytest.raises(StoreError, match="shard_0"):
            tables.tables_of(PackedStore.open(kept))


def reads_rows(module: Any) -> bool:
    return isinstance(vars(module).get("weight"), tables.StoredWeight)


def test_a_predictor_that_looks_at_embeddings(store: Path) -> None:
    with loaded(store, system="fmoe", memory="50%") as model:
        tokens = generate(model, make_prompts(2))
    with in_memory(), loaded(store, system="fmoe", memory="50%") as whole:
        assert generate(whole, make_prompts(2)) == tokens


def test_a_table_of_a_gguf_file_keeps_its_bytes(tmp_path: Path) -> None:
    """Of Q8_0, in blocks of 16 rows."""
    path = make_gguf(tmp_path / "model.gguf", "Q8_0", dense="Q8_0", others={"token_embd.weight": "Q8_0"})
    kept = pack(path, tmp_path / "store").folder
    (table,), _ = tables.tables_of(PackedStore.open(kept))
    assert table.format is not None and table.rows_of_unit == 16
    with in_memory(), loaded(kept) as whole:
        same = answers(whole, batches=True)
    with loaded(kept) as model:
        read = answers(model, batches=True)
    assert torch.equal(read[0], same[0]) and read[1:] == same[1:]


def test_gemmas_table_of_a_gguf_file_keeps_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that scales what it looks up, which in memory is decoded."""
    monkeypatch.setattr(tables, "TABLE_NBYTES", 1 << 20)
    usual = CASES["gemma4"]
    case = replace(
        usual,
        fields={**usual.fields, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 262144},
        metadata=lambda config: {**usual.metadata(config), "embedding_length_per_layer_input": 8},
    )
    reference = gguf_models.make_model(case)
    path = gguf_models.write_model(tmp_path / "model.gguf", reference, case, "Q8_0")
    kept = pack(path, tmp_path / "store").folder
    (table,), _ = tables.tables_of(PackedStore.open(kept))
    assert (table.path, table.nbytes) == ("model.embed_tokens_per_layer", 262144 * 34)
    ids = torch.randint(0, 262144, (3, 50), generator=torch.Generator().manual_seed(0))
    with loaded(kept) as model:
        read, expected = (it.model.embed_tokens_per_layer(ids) for it in (model, reference))
        assert torch.equal(read, expected)
        assert generate(model, make_prompts(2)) == generate(reference, make_prompts(2))


def test_a_table_that_is_also_the_head_stays_in_memory(tmp_path: Path) -> None:
    kept = pack(checkpoint("gemma4_text", tmp_path / "checkpoint"), tmp_path / "store").folder
    with loaded(kept) as model:
        assert model.lm_head.weight is model.model.embed_tokens.weight


# -- reads -----------------------------------------------------------------------------------------------------------


class Reads:
    """Of the dense file, as (first page, pages)."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[int, int]] = []
        self.error: int | None = None
        self.lasts_s, self.num_running = 0.0, 0
        self.buffers: set[int] = set()
        Preads(patch, self._read)

    def _read(self, file: int, buffer: memoryview, offset: int) -> int:
        if not os.readlink(f"/proc/self/fd/{file}").endswith(DENSE_NAME):
            return os.preadv(file, [buffer], offset)
        self.seen.append((offset // PAGE, -(-len(buffer) // PAGE)))
        self.buffers.add(ctypes.addressof(ctypes.c_char.from_buffer(buffer)))
        assert offset % PAGE == 0, "past the page cache"
        if self.error:
            raise OSError(self.error, os.strerror(self.error))
        self.num_running += 1
        time.sleep(self.lasts_s)
        self.num_running -= 1
        return os.preadv(file, [buffer], offset)

    @property
    def num_pages(self) -> int:
        return sum(pages for _, pages in self.seen)


def wide_store(tmp_path: Path) -> Path:
    """Of rows of 64 KiB, in a vocabulary of 128."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=128, hidden_size=16384, intermediate_size=16, moe_intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1, head_dim=8, num_experts=2, num_experts_per_tok=1,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "checkpoint")
    return pack(tmp_path / "checkpoint", tmp_path / "store").folder


def test_each_row_is_read_once_a_pass_and_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = wide_store(tmp_path)
    reads = Reads(monkeypatch)
    monkeypatch.setattr(tables, "_IN_FLIGHT_NBYTES", 20 << 16)
    with loaded(kept, memory="100%") as model:
        look_up = model.get_input_embeddings()
        (table,), _ = tables.tables_of(PackedStore.open(kept))
        first = table.parts[0].begin // PAGE
        reads.seen.clear()
        look_up(torch.tensor([[7, 90, 7], [91, 7, 7]]))
        assert sorted(page - first for page, _ in reads.seen) == [7 * 16, 90 * 16], "neighbours are one read"
        assert 3 * 16 <= reads.num_pages <= 3 * 17, "a row may begin within a page"
        reads.seen.clear()
        every = look_up(torch.arange(128))
        assert len(reads.seen) <= 16
        assert max(reads.buffers) - min(reads.buffers) < 20 << 16, "so much is in flight"
        assert torch.equal(every, load_reference(tmp_path / "checkpoint").model.embed_tokens.weight)
        assert len(look_up(torch.empty(0, dtype=torch.long))) == 0
        for ids in ([128], [-1]):
            with pytest.raises(IndexError, match="out of range"):
                look_up(torch.tensor(ids))
        with pytest.raises(TypeError, match="int32 or int64"):
            look_up(torch.tensor([1.0]))


def test_rows_that_were_used_last_are_kept_in_memory_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, reads = wide_store(tmp_path), Reads(monkeypatch)
    with loaded(kept, memory="100%", table_memory=3 << 16) as model:
        look_up = model.get_input_embeddings()
        expected = look_up.weight + 0

        def num_read(*ids: int) -> int:
            reads.seen.clear()
            assert torch.equal(look_up(torch.tensor(ids)), expected[list(ids)])
            return reads.num_pages // 16

        assert [num_read(1), num_read(2), num_read(3)] == [1, 1, 1]
        assert num_read(1, 2, 3) == 0
        assert [num_read(2), num_read(3), num_read(4), num_read(2, 3, 4)] == [0, 0, 1, 0]
        assert num_read(1) == 1, "which was used longest ago"
    with loaded(kept, memory="100%", table_memory="100%") as model:
        for _ in range(2):
            reads.seen.clear()
            model.get_input_embeddings()(torch.arange(128))
        assert not reads.seen
    with pytest.raises(ConfigError, match=r"table_memory='auto': accepted: an amount .* or a share .* of the tables"):
        expertly.load(str(kept), table_memory="auto", device="cpu")
    with in_memory(), pytest.raises(ConfigError, match="table_memory='1GiB': this model has no table"):
        expertly.load(str(kept), table_memory="1GiB", device="cpu")


def test_rows_of_n_grams_are_read_beside_the_layers_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them while the first layer runs, for a prompt and for each token after it; a pass that fails there leaves
    nothing that is being read.
    """
    kept = pack(checkpoint("qwen4_exp_text", tmp_path / "checkpoint"), tmp_path / "store").folder
    reads, prompts, num_read = Reads(monkeypatch), make_prompts(1), list[int]()
    some = [table.parts for table in tables.tables_of(PackedStore.open(kept))[0] if table.path in N_GRAMS]
    pages = [range(parts[0].begin // PAGE, (parts[-1].begin + parts[-1].nbytes) // PAGE) for parts in some]

    def first_layer(*_: Any) -> None:
        until(lambda: all(any(page in table for page, _ in reads.seen) for table in pages))
        if reads.lasts_s:
            raise KeyboardInterrupt

    with loaded(kept) as model:
        first, *more = model.model.layers
        expected = generate(model, prompts, 6)
        first.register_forward_pre_hook(first_layer)
        more[0].register_forward_pre_hook(lambda *_: num_read.append(len(reads.seen)))
        more[-1].register_forward_hook(lambda *_: num_read.append(len(reads.seen)) or reads.seen.clear())
        reads.seen.clear()
        assert generate(model, prompts, 6) == expected
        assert len(num_read) == 12 and num_read[::2] == num_read[1::2]
        reads.lasts_s = 0.2
        with pytest.raises(KeyboardInterrupt):
            generate(model, prompts, 6)
        assert reads.num_running == 0
        reads.lasts_s, reads.error = 0, errno.EIO
        with pytest.raises(TransferError, match="Input"):
            generate(model, prompts, 6)
        reads.error = None
        assert generate(model, prompts, 6) == expected


# -- whoever wants more than rows ------------------------------------------------------------------------------------


def test_all_of_a_table_is_read_for_whoever_wants_more_than_rows(store: Path) -> None:
    ids = torch.tensor(make_prompts(1))
    with in_memory(), loaded(store) as whole:
        weight = whole.model.embed_tokens.weight.clone()
        logits = whole(inputs_embeds=whole.model.embed_tokens(ids)).logits
    with loaded(store) as model:
        table = model.model.embed_tokens.weight
        assert (table.shape, table.dtype, table.device) == (weight.shape, weight.dtype, weight.device)
        assert torch.equal(table[3:5], weight[3:5]) and torch.equal(torch.cat([table, table])[128:], weight)
        assert torch.equal(table.data, weight) and torch.equal(table.T @ table, weight.T @ weight)
        assert torch.equal(model(inputs_embeds=model.model.embed_tokens(ids)).logits, logits)


def test_a_look_up_is_no_part_of_a_program(store: Path) -> None:
    """A program does the same again, whatever the token."""
    with loaded(store) as model:
        notes = Notes(handle(model).engine.shard.kernels)
        notes.begin()
        with pytest.raises(NotedError):
            model.get_input_embeddings()(torch.tensor([[5]]))
        notes.abandon()


# -- what fails ------------------------------------------------------------------------------------------------------


def test_a_read_that_fails_fails_the_pass_and_no_other(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = Reads(monkeypatch)
    with loaded(store) as model:
        tokens = generate(model, make_prompts(2))
        reads.error = errno.EIO
        with pytest.raises(TransferError, match=rf"{DENSE_NAME}: reading \d+ bytes at offset \d+ failed \(Input"):
            generate(model, make_prompts(2))
        with pytest.raises(Exception):  # noqa: B017 - upstream ends its thread and says so in its own way
            assert run_batch(model, make_prompts(2))
        reads.error = None
        assert generate(model, make_prompts(2)) == tokens


@pytest.mark.parametrize(
    ("change", "verify"), [("written", "sampled"), ("cut", "sampled"), ("touched", "sampled"), ("touched", "never")]
)
def test_a_store_that_is_changed(change: str, verify: str, store: Path) -> None:
    """Where reads are compared, one that has the bytes that it should have is as good as before."""
    path = store / DENSE_NAME
    with loaded(store, verify=verify) as model:
        tokens = generate(model, make_prompts(1))
        if change == "touched":
            path.touch()
        elif change == "cut":
            os.truncate(path, 8192)
        else:
            with path.open("r+b") as file:
                file.seek(-4, os.SEEK_END)
                file.write(b"\1\2\3\4")
        if (change, verify) == ("touched", "sampled"):
            assert generate(model, make_prompts(1)) == tokens and len(open_files(path)) == 2
        else:
            with pytest.raises(TransferError, match=f"{DENSE_NAME}: was written to while in use"):
                generate(model, make_prompts(1))


def test_unloading_closes_the_file_and_a_forked_child_is_refused(store: Path) -> None:
    before = open_files(store), threading.active_count()
    model, _ = expertly.load(str(store), memory="50%", device="cpu")
    look_up, ids = model.get_input_embeddings(), torch.tensor([[5]])
    row = look_up(ids)

    def run() -> None:
        with pytest.raises(EngineClosedError, match="before this process was forked"):
            look_up(ids)

    assert exit_code_of_a_child(run) == 0
    assert exit_code_of_a_child(lambda: expertly.unload(model)) == 0
    assert torch.equal(look_up(ids), row), "the parent goes on"
    expertly.unload(model)
    assert (open_files(store), threading.active_count(), reader_threads()) == (*before, [])
    with pytest.raises(EngineClosedError, match="was unloaded"):
        look_up(ids)


# -- what it saves ---------------------------------------------------------------------------------------------------


def test_memory_is_planned_without_tables_and_doctor_counts_them_as_disk(tmp_path: Path) -> None:
    folder = checkpoint("gemma4_text", tmp_path / "checkpoint")
    kept = pack(folder, tmp_path / "store").folder
    whole = PackedStore.open(kept)
    (table,), rest = tables.tables_of(whole)
    assert table.nbytes == VOCAB_SIZE * 4 * 16 * 4 == whole.dense_nbytes - rest.dense_nbytes
    for source in (kept, folder, folder / "config.json"):
        needs = needs_of(str(source))
        nbytes = table.nbytes if needs.dtype == "float32" else table.nbytes // 2
        assert needs.tables_nbytes == nbytes
        assert needs.dense_nbytes == rest.dense_nbytes * nbytes // table.nbytes or source == folder / "config.json"
    with loaded(kept) as model:
        assert sum(parameter.nbytes for parameter in model.parameters()) < rest.dense_nbytes
        assert handle(model).division.beside.dense_nbytes == rest.dense_nbytes
        assert expertly.stats(model).as_dict()["dense"]["bytes"] == rest.dense_nbytes
        fixed = handle(model).division.beside.fixed_nbytes
    assert fixed == beside_experts(rest, 4, torch.device("cpu")).fixed_nbytes
    with loaded(kept, table_memory="50%") as model:
        assert handle(model).division.beside.fixed_nbytes == fixed + table.nbytes // 2
