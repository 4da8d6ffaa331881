"""`expertly lab learned`: what it makes, what it says, what it refuses."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from expertly.cli.main import main
from expertly.core.geometry import Geometry, LayerGeometry
from expertly.model.packing import pack_cached
from expertly.policies.learned import ModelShape, read_learned, save_learned
from expertly.policies.predictor.eam import EAM
from expertly.policies.predictor.eam.matrices import Matrices
from expertly.policies.predictor.fmoe import FMoE, FMoEOptions
from expertly.policies.predictor.fmoe.store import NONE, mean_similarities
from expertly.sim.schedule import Selection, make_schedule
from expertly.sim.training import histories
from expertly.trace.reader import Trace
from expertly.trace.schema import TraceLayer, trace_field
from expertly.trace.writer import TraceWriter
from tests.cli.asking import Captured, answer, refusal
from tests.families import make_checkpoint
from tests.policies.learned_builders import (
    IDENTITY,
    assert_same,
    assert_same_state,
    load_maps,
    make_matrices,
    make_store,
    taught,
)
from tests.test_architecture import run_without_torch

LAYERS = (TraceLayer(8, 2), TraceLayer(6, 1), TraceLayer(8, 2))
BASE = ("token", "is_prefill", "experts", "weights")
LENGTHS = (3, 1, 4, 2, 5, 7, 6, 9, 8, 10)


def make_trace(
    folder: Path, layers: tuple[TraceLayer, ...] = LAYERS, fields: tuple[str, ...] = ("probs", "embedding")
) -> Path:
    """Ten requests of 3, 1, 4, ... tokens, each an iteration."""
    rng = np.random.default_rng(0)
    infos = [trace_field(name, layers, hidden_size=5) for name in fields]
    with TraceWriter(folder, model="toy", layers=layers, fields=infos, rows_per_shard=16) as writer:
        for number, length in enumerate(LENGTHS):
            writer.begin_request("even" if number % 2 == 0 else "odd", "hello", 0)
            for _ in range(length):
                probs = rng.random((1, len(layers), max(layer.num_experts for layer in layers))) ** 3
                experts = np.full((1, len(layers), max(layer.top_k for layer in layers)), NONE, np.uint16)
                for index, layer in enumerate(layers):
                    probs[0, index, layer.num_experts :] = 0
                    experts[0, index, : layer.top_k] = np.argsort(-probs[0, index])[: layer.top_k]
                probs /= probs.sum(-1, keepdims=True)
                weights = np.where(experts == NONE, 0, 1 / 2).astype(np.float16)
                rows = {"token": np.zeros(1, np.int32), "is_prefill": np.zeros(1, bool)}
                rows |= {"experts": experts, "weights": weights, "probs": probs.astype(np.float16)}
                rows["embedding"] = rng.standard_normal((1, 5)).astype(np.float16)
                writer.append({name: values for name, values in rows.items() if name in (*fields, *BASE)})
    return folder


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_trace(tmp_path_factory.mktemp("maps") / "trace")


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Two files of one model: 15 of 20 maps, and 9 of 12."""
    paths = [tmp_path / "a.maps", tmp_path / "b.maps"]
    save_learned(paths[0], make_store(), IDENTITY, {"model": "toy", "source": "a test"})
    save_learned(paths[1], make_store(9, 12, seed=1), IDENTITY)
    return paths


def printed(capsys: Captured, *words: object) -> dict[str, Any]:
    return answer(capsys, "lab", "learned", *words)


def refused(capsys: Captured, *words: object) -> str:
    return refusal(capsys, "lab", "learned", *words)


def test_info_says_what_there_is(files, capsys):
    facts = printed(capsys, "info", files[0])
    assert (facts["maps"], facts["capacity"], facts["requests"], facts["max_maps_of_request"]) == (15, 20, 4, 10)
    assert (facts["num_experts"], facts["top_k"], facts["embedding_size"]) == ([8, 6, 8], [2, 3, 3], 5)
    assert (facts["identity"], facts["about"]) == (IDENTITY, {"model": "toy", "source": "a test"})
    assert facts["coverage"] == [
        {"similarity": 0.75, "maps": 44},
        {"similarity": 0.98, "maps": math.ceil(11 * math.log(22))},
    ]
    assert (facts["maps_bytes"], facts["embeddings_bytes"]) == (3 * 15 * 8 * 4, 15 * 5 * 4)
    assert (facts["full_maps_bytes"], facts["full_embeddings_bytes"]) == (3 * 20 * 8 * 4, 20 * 5 * 4)
    assert facts["file_bytes"] == files[0].stat().st_size
    found = facts["mean_similarity"], facts["mean_embedding_similarity"]
    assert found == pytest.approx(mean_similarities(make_store())) and facts["sampled_maps"] == 15


def test_info_says_the_same_to_people(files, capsys):
    assert main(["lab", "learned", "info", str(files[0])]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("[toy | 3 layers of 6 to 8 experts, top-2 to 3 | 15 of at most 20 maps | 4 requests")
    found = {line[: line.index("  ")]: line for line in lines[1:]}
    assert "2 L E = 44 maps; here are 34.1% of them" in found["similar to 75%"]
    assert "L E ln(L E) / 2 = 35 maps" in found["similar to 98%"]
    assert "1.41 KiB" in found["maps bytes"] and "300 B" in found["embeddings bytes"]
    assert found["source"].endswith("a test") and found["identity"].endswith(IDENTITY)


def test_a_terminal_does_not_obey_a_file(tmp_path, capsys):
    save_learned(tmp_path / "a.maps", make_store(), IDENTITY, {"model": "\x1b[2J", "source": "a\nb"})
    assert main(["lab", "learned", "info", str(tmp_path / "a.maps")]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out and "x1b[2J" in out and "'a\\nb'" in out


def test_merge_makes_one_of_two(files, tmp_path, capsys):
    facts = printed(capsys, "merge", tmp_path / "c.maps", *files)
    assert (facts["maps"], facts["capacity"], facts["requests"], facts["identity"]) == (20, 20, 7, IDENTITY)
    facts = printed(capsys, "merge", files[0], *files, "--capacity", 30)
    assert (facts["maps"], facts["capacity"]) == (24, 30)
    assert str(files[1]) in facts["about"]["source"] and facts["about"]["model"] == "toy"
    assert load_maps(files[0], IDENTITY).num_maps == 24


def test_merge_takes_files_of_one_model_only(files, tmp_path, capsys):
    other = tmp_path / "other.maps"
    out = tmp_path / "c.maps"
    save_learned(other, make_store(), "5" * 64)
    assert "other.maps: identity='5555" in refused(capsys, "merge", out, files[0], other)
    save_learned(other, make_store(hidden_size=7), IDENTITY)
    assert "other.maps: tensor 'embeddings': 7 numbers each" in refused(capsys, "merge", out, files[0], other)
    assert not out.exists()


def test_export_writes_plain_arrays(files, tmp_path, capsys):
    out = tmp_path / "c.npz"
    facts = printed(capsys, "export", files[0], out)
    assert facts["bytes"] == out.stat().st_size and facts["arrays"]["maps"] == [3, 15, 8]
    with np.load(out, allow_pickle=False) as arrays:
        state = make_store().state()
        for name in ("maps", "chosen", "born", "embeddings"):
            np.testing.assert_array_equal(arrays[name], state[name])
        assert arrays["num_experts"].tolist() == [8, 6, 8] and str(arrays["identity"]) == IDENTITY
    assert "must end in .npz" in refused(capsys, "export", files[0], tmp_path / "c.json")
    assert "writing c.npz failed" in refused(capsys, "export", files[0], tmp_path / "absent" / "c.npz")


def test_build_makes_what_fmoe_learns(trace, tmp_path, capsys):
    printed(capsys, "build", trace, tmp_path / "a.maps", "--split", "7:3", "--capacity", "24", "--distance", "2")
    opened = Trace.open(trace)
    geometry = Geometry(tuple(LayerGeometry(layer.num_experts, layer.top_k, 1, 1, 2, 1) for layer in LAYERS))
    predictor = FMoE(geometry, 2, FMoEOptions(capacity=24))
    training = make_schedule(opened, Selection(split=(7, 3))).training
    for history in histories(opened, training, predictor.wants):
        predictor.learn(history)
    assert predictor.learned.num_maps > 10
    assert_same(load_maps(tmp_path / "a.maps"), predictor.learned)


def test_build_of_a_trace_with_made_up_embeddings_goes_without(tmp_path, capsys):
    experts = np.argsort(np.random.default_rng(0).random((30, 2, 8)), axis=-1)[..., :2].astype(np.uint8)
    np.savez(tmp_path / "law.npz", experts=experts, seq_len=np.array([10, 20]), token_index=np.arange(30))
    assert main(["lab", "trace", "import", str(tmp_path / "law.npz"), str(tmp_path / "trace")]) == 0
    capsys.readouterr()
    assert main(["lab", "learned", "build", str(tmp_path / "trace"), str(tmp_path / "a.maps"), "--quota", "1"]) == 0
    out, err = capsys.readouterr()
    assert "made up" in err and "30 of at most 1000 maps | 2 requests | without embeddings" in out
    store = load_maps(tmp_path / "a.maps")
    chosen = np.sort(store.chosen[:30, 0].astype(int), axis=1)
    np.testing.assert_array_equal(np.sort(np.argsort(-store.maps[0, :30], axis=1)[:, :2], axis=1), chosen)
    assert store.maps[0, :30].sum(axis=1) == pytest.approx(1, abs=1e-3)


def test_build_for_a_model_is_what_its_engine_takes(tmp_path, capsys):
    folder = make_checkpoint("qwen3_moe", tmp_path / "model")
    store = pack_cached(folder, cache_dir=tmp_path / "cache")
    identity, shape = store.manifest.identity, ModelShape.of(store.geometry())
    layers = tuple(TraceLayer(*numbers) for numbers in zip(shape.num_experts, shape.top_k, strict=True))
    trace = make_trace(tmp_path / "trace", layers)
    paths = [tmp_path / f"{number}.maps" for number in range(4)]
    capsys.readouterr()
    assert printed(capsys, "build", trace, paths[0], "--model", folder)["identity"] == identity, "not packed, here"
    pack_cached(folder)
    for path, model in zip(paths[1:3], (store.folder, folder), strict=True):
        assert printed(capsys, "build", trace, path, "--model", model)["identity"] == identity
        assert_same(load_maps(path, identity, shape), load_maps(paths[0], identity, shape))
    printed(capsys, "build", trace, paths[3])
    message = refused(capsys, "merge", tmp_path / "all.maps", *paths)
    assert "identity='trace:toy'" in message and "`expertly lab learned build --model` names it" in message
    wider = tuple(TraceLayer(*numbers, 48, 16, 3, 4) for numbers in zip(shape.num_experts, shape.top_k, strict=True))
    for number, (others, expected) in enumerate(
        (
            (LAYERS, f"layer 0 has top_k={shape.top_k[0]}, but 2 in "),
            (layers[:2], "3 MoE layers, but "),
            (wider, "layer 0 has hidden_size=32, but 48 in "),
        )
    ):
        other = make_trace(tmp_path / f"other-{number}", others)
        for model in (store.folder, folder):
            message = refused(capsys, "build", other, tmp_path / "other.maps", "--model", model)
            assert f"model='{model}': {expected}" in message
    assert not (tmp_path / "other.maps").exists()


def test_works_without_torch(trace, tmp_path):
    path = str(tmp_path / "a.maps")
    lines = ["from expertly.cli.main import main"]
    for arguments in (["build", str(trace), path], ["info", path]):
        lines.append(f"assert main({['lab', 'learned', *arguments]!r}) == 0")
    done = run_without_torch("\n".join(lines))
    assert done.returncode == 0, done.stderr


@pytest.fixture
def collections(tmp_path: Path) -> list[Path]:
    """Two files of one model, and one of maps."""
    paths = [tmp_path / "a.matrices", tmp_path / "b.matrices", tmp_path / "c.maps"]
    save_learned(paths[0], make_matrices(), IDENTITY, {"model": "toy", "source": "a test"})
    save_learned(paths[1], make_matrices(1, 3, 5, seed=1), IDENTITY)
    save_learned(paths[2], make_store(), IDENTITY)
    return paths


def test_info_of_matrices_says_what_there_is(collections, capsys):
    facts = printed(capsys, "info", collections[0])
    assert (facts["prefill_matrices"], facts["decode_matrices"], facts["capacity"]) == (4, 6, 8)
    assert facts["coverage"][1] == {"similarity": 0.98, "matrices": math.ceil(11 * math.log(22))}
    assert facts["decode_tokens"] == int(make_matrices().decode.total[0].sum()) // 2
    assert (facts["matrices_bytes"], facts["full_matrices_bytes"]) == (10 * 3 * 8 * 8, 16 * 3 * 8 * 8)
    assert facts["file_bytes"] == collections[0].stat().st_size


def test_info_of_matrices_says_the_same_to_people(collections, capsys):
    assert main(["lab", "learned", "info", str(collections[0])]) == 0
    out = capsys.readouterr().out
    assert "[toy | 3 layers of 6 to 8 experts, top-2 to 3 | matrices of 4 prompts and 6 answers | at most 8 each" in out
    assert "2 L E = 44 matrices; here are 9.1%" in out
    assert ["decode", "matrices", "6"] in [line.split() for line in out.splitlines()]


def test_merge_of_matrices(collections, tmp_path, capsys):
    out = tmp_path / "d.matrices"
    facts = printed(capsys, "merge", out, *collections[:2])
    assert (facts["prefill_matrices"], facts["decode_matrices"], facts["capacity"]) == (5, 8, 8)
    assert facts["identity"] == IDENTITY and str(collections[1]) in facts["about"]["source"]
    facts = printed(capsys, "merge", out, *collections[:2], "--capacity", 20)
    assert facts["decode_matrices"] == 9 == read_learned(out, Matrices, identity=IDENTITY).learned.decode.num_matrices
    facts = printed(capsys, "merge", out, out, "--capacity", 3)
    assert (facts["prefill_matrices"], facts["decode_matrices"], facts["file"]) == (3, 3, str(out))


def test_kinds_do_not_mix(collections, tmp_path, capsys):
    out = tmp_path / "d"
    assert "format='expertly-maps'" in refused(capsys, "merge", out, collections[0], collections[2])
    assert "format='expertly-matrices'" in refused(capsys, "merge", out, collections[2], collections[0])
    save_learned(collections[1], make_matrices(), "5" * 64)
    assert "b.matrices: identity='5555" in refused(capsys, "merge", out, collections[0], collections[1])
    assert not out.exists()


def test_build_makes_what_moe_infinity_learns(tmp_path, capsys):
    trace, out = make_trace(tmp_path / "trace"), tmp_path / "a.matrices"
    facts = printed(capsys, "build", trace, out, "--kind", "matrices")
    assert (facts["decode_matrices"], facts["prefill_matrices"], facts["capacity"]) == (len(LENGTHS), 0, 120)
    assert facts["decode_tokens"] == sum(LENGTHS) and facts["identity"] == "trace:toy"
    printed(capsys, "build", trace, out, "--kind", "matrices", "--capacity", 4, "--split", "7:3")
    opened = Trace.open(trace)
    predictor = EAM(Geometry(tuple(LayerGeometry(layer.num_experts, layer.top_k, 1, 1, 2, 1) for layer in LAYERS)))
    for history in histories(opened, make_schedule(opened, Selection(split=(7, 3))).training, predictor.wants):
        predictor.learn(history)
    predictor.finish()
    small = Matrices(predictor.learned.shape, 4)
    small.decode.extend(predictor.learned.decode)
    assert_same_state(read_learned(out, Matrices).learned, small)
    for flag in ("--quota", "--distance"):
        message = refused(capsys, "build", trace, out, "--kind", "matrices", flag, "1")
        assert f"{flag[2:]}=1" in message and "of no use with kind='matrices'; accepted: kind=maps" in message


PROMPT = "Once upon a time"


@pytest.fixture
def reuse(tmp_path: Path) -> Path:
    path = tmp_path / "a.reuse"
    about = {"model": "\x1b[2J", "source": "a test", "created": "2026-01-02T03:04:05+00:00"}
    save_learned(path, taught(70), IDENTITY, about)
    return path


def run(model: Path, *arguments: str) -> int:
    return main(["generate", str(model), "--prompt", PROMPT, "--memory", "50%", "--max-new-tokens", "20", *arguments])


def test_the_second_run_begins_with_what_the_first_learned(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "my.reuse")
    arguments = ("--system", "expertly", "--learned", path)
    assert run(model, *arguments, "--stats") == 0
    out = capsys.readouterr().out
    assert f"[reuse: began with nothing learned: there was no {path} | " in out
    text = out[: out.index("\n[")]
    assert run(model, *arguments, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["reuse"]["history"] == "warm" and result["text"].rstrip("\n") == text.rstrip("\n")
    num_read, num = result["reuse"]["tokens_read"], result["reuse"]["tokens"]
    assert num == 2 * num_read > 0
    assert run(model, *arguments, "--stats") == 0
    line = f"[reuse: began with what {num} tokens had taught: {path} | {3 * num_read} tokens by now]"
    assert line in capsys.readouterr().out
    assert run(model, "--system", "expertly", "--learned", "off", "--stats") == 0
    assert f"[reuse: began with nothing learned: learned=off | {num_read} tokens by now]" in capsys.readouterr().out
    assert run(model, "--learned", "off", "--json") == 0
    assert json.loads(capsys.readouterr().out)["reuse"] is None, "lru learns nothing"


def test_info_of_reuse_says_what_there_is(reuse: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", "learned", "info", str(reuse), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["tokens"], facts["weights"], facts["experts"]) == (70, 22 * 22, 22)
    assert (facts["num_layers"], facts["num_experts"], facts["top_k"]) == (3, [8, 6, 8], [2, 3, 3])
    assert (facts["identity"], facts["about"]["created"]) == (IDENTITY, "2026-01-02T03:04:05+00:00")
    assert facts["file_bytes"] == reuse.stat().st_size
    assert main(["lab", "learned", "info", str(reuse)]) == 0
    out = capsys.readouterr().out
    first, *lines = out.splitlines()
    assert "3 layers of 6 to 8 experts, top-2 to 3 | learned of reuse from 70 tokens | " in first
    assert any(line.startswith("created") and line.endswith("2026-01-02T03:04:05+00:00") for line in lines)
    assert any(line.startswith("meaning") and "discount 0.9, horizon 8" in line for line in lines)
    assert ["weights", "484"] in [line.split() for line in lines]
    assert "\x1b" not in out, "a terminal does not obey a file"
    reuse.write_bytes(reuse.read_bytes()[:-4])
    assert main(["lab", "learned", "info", str(reuse)]) == 2
    assert "reach beyond" in capsys.readouterr().err


def test_other_commands_say_what_they_take(reuse: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    maps, out, before = tmp_path / "a.maps", str(tmp_path / "out.npz"), reuse.read_bytes()
    save_learned(maps, make_store(), IDENTITY)
    accepted = "format='expertly-reuse': not a file of that kind; accepted: 'expertly-maps'"
    for arguments in (("export", str(reuse), out), ("merge", out, str(reuse))):
        assert main(["lab", "learned", *arguments]) == 2
        assert accepted in capsys.readouterr().err
    assert main(["lab", "learned", "merge", out, str(maps), str(reuse)]) == 2
    assert accepted in capsys.readouterr().err
    assert reuse.read_bytes() == before and not Path(out).exists()
