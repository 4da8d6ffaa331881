"""`expertly lab learned`: what it makes, what it says, what it refuses."""

from __future__ import annotations

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
from tests.cli.asking import Captured, answer, refusal, told
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
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the current folder: of one model maps (15 of 20, 9 of 12), matrices, reuse weights; and files that differ."""
    monkeypatch.chdir(tmp_path)
    toy = {"model": "toy", "source": "a test"}
    save_learned(Path("a.maps"), make_store(), IDENTITY, toy)
    save_learned(Path("b.maps"), make_store(9, 12, seed=1), IDENTITY)
    save_learned(Path("other.maps"), make_store(), "5" * 64)
    save_learned(Path("wide.maps"), make_store(hidden_size=7), IDENTITY)
    save_learned(Path("a.matrices"), make_matrices(), IDENTITY, toy)
    save_learned(Path("b.matrices"), make_matrices(1, 3, 5, seed=1), IDENTITY)
    save_learned(Path("other.matrices"), make_matrices(), "5" * 64)
    hostile = {"model": "\x1b[2J", "source": "a\ntest", "created": "2026-01-02T03:04:05+00:00"}
    save_learned(Path("a.reuse"), taught(70), IDENTITY, hostile)
    Path("cut.reuse").write_bytes(Path("a.reuse").read_bytes()[:-4])


def printed(capsys: Captured, *words: object) -> dict[str, Any]:
    return answer(capsys, "lab", "learned", *words)


def refused(capsys: Captured, *words: object) -> str:
    return refusal(capsys, "lab", "learned", *words)


def test_info_says_what_there_is(files, capsys):
    facts = printed(capsys, "info", "a.maps")
    assert (facts["maps"], facts["capacity"], facts["requests"], facts["max_maps_of_request"]) == (15, 20, 4, 10)
    assert (facts["num_experts"], facts["top_k"], facts["embedding_size"]) == ([8, 6, 8], [2, 3, 3], 5)
    assert (facts["identity"], facts["about"]) == (IDENTITY, {"model": "toy", "source": "a test"})
    assert facts["coverage"] == [
        {"similarity": 0.75, "maps": 44},
        {"similarity": 0.98, "maps": math.ceil(11 * math.log(22))},
    ]
    assert (facts["maps_bytes"], facts["embeddings_bytes"]) == (3 * 15 * 8 * 4, 15 * 5 * 4)
    assert (facts["full_maps_bytes"], facts["full_embeddings_bytes"]) == (3 * 20 * 8 * 4, 20 * 5 * 4)
    assert facts["file_bytes"] == Path("a.maps").stat().st_size
    found = facts["mean_similarity"], facts["mean_embedding_similarity"]
    assert found == pytest.approx(mean_similarities(make_store())) and facts["sampled_maps"] == 15
    facts = printed(capsys, "info", "a.matrices")
    assert (facts["prefill_matrices"], facts["decode_matrices"], facts["capacity"]) == (4, 6, 8)
    assert facts["coverage"][1] == {"similarity": 0.98, "matrices": math.ceil(11 * math.log(22))}
    assert facts["decode_tokens"] == int(make_matrices().decode.total[0].sum()) // 2
    assert (facts["matrices_bytes"], facts["full_matrices_bytes"]) == (10 * 3 * 8 * 8, 16 * 3 * 8 * 8)
    facts = printed(capsys, "info", "a.reuse")
    assert (facts["tokens"], facts["weights"], facts["experts"]) == (70, 22 * 22, 22)


HEAD = "3 layers of 6 to 8 experts, top-2 to 3 | "


@pytest.mark.parametrize(
    ("file", "head", "lines"),
    [
        (
            "a.maps",
            f"[toy | {HEAD}15 of at most 20 maps | 4 requests",
            {
                "similar to 75%": "2 L E = 44 maps; here are 34.1% of them",
                "similar to 98%": "L E ln(L E) / 2 = 35 maps",
                "maps bytes": "1.41 KiB",
                "embeddings bytes": "300 B",
                "source": "a test",
                "identity": IDENTITY,
            },
        ),
        (
            "a.matrices",
            f"[toy | {HEAD}matrices of 4 prompts and 6 answers | at most 8 each",
            {"similar to 75%": "2 L E = 44 matrices; here are 9.1%", "decode matrices": "6"},
        ),
        (
            "a.reuse",
            f"['\\x1b[2J' | {HEAD}learned of reuse from 70 tokens | ",
            {
                "created": "2026-01-02T03:04:05",
                "meaning": "discount 0.9, horizon 8",
                "weights": "484",
                "source": "a\\ntest",
            },
        ),
    ],
)
def test_people_read_the_same(file, head, lines, files, capsys):
    """And a terminal does not obey what a file says."""
    first, *others = told(capsys, "lab", "learned", "info", file).splitlines()
    assert first.startswith(head) and "\x1b" not in "".join(others)
    found = {line[: line.index("  ")]: line for line in others}
    assert all(said in found[name] for name, said in lines.items()), found


def test_merge_makes_one_of_two(files, capsys):
    facts = printed(capsys, "merge", "c.maps", "a.maps", "b.maps")
    assert (facts["maps"], facts["capacity"], facts["requests"], facts["identity"]) == (20, 20, 7, IDENTITY)
    facts = printed(capsys, "merge", "a.maps", "a.maps", "b.maps", "--capacity", 30)
    assert (facts["maps"], facts["capacity"]) == (24, 30)
    assert "b.maps" in facts["about"]["source"] and facts["about"]["model"] == "toy"
    assert load_maps(Path("a.maps"), IDENTITY).num_maps == 24


def test_export_writes_plain_arrays(files, capsys):
    facts = printed(capsys, "export", "a.maps", "c.npz")
    assert facts["bytes"] == Path("c.npz").stat().st_size and facts["arrays"]["maps"] == [3, 15, 8]
    with np.load("c.npz", allow_pickle=False) as arrays:
        state = make_store().state()
        for name in ("maps", "chosen", "born", "embeddings"):
            np.testing.assert_array_equal(arrays[name], state[name])
        assert arrays["num_experts"].tolist() == [8, 6, 8] and str(arrays["identity"]) == IDENTITY


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


def test_merge_of_matrices(files, capsys):
    both = ("a.matrices", "b.matrices")
    facts = printed(capsys, "merge", "d", *both)
    assert (facts["prefill_matrices"], facts["decode_matrices"], facts["capacity"]) == (5, 8, 8)
    assert facts["identity"] == IDENTITY and "b.matrices" in facts["about"]["source"]
    facts = printed(capsys, "merge", "d", *both, "--capacity", 20)
    read = read_learned(Path("d"), Matrices, identity=IDENTITY).learned
    assert facts["decode_matrices"] == 9 == read.decode.num_matrices
    facts = printed(capsys, "merge", "d", "d", "--capacity", 3)
    assert (facts["prefill_matrices"], facts["decode_matrices"], facts["file"]) == (3, 3, "d")


NOT_REUSE = "format='expertly-reuse': not a file of that kind; accepted: 'expertly-maps'"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("merge out.npz a.maps other.maps", "other.maps: identity='5555"),
        ("merge out.npz a.maps wide.maps", "wide.maps: tensor 'embeddings': 7 numbers each"),
        ("merge out.npz a.matrices other.matrices", "other.matrices: identity='5555"),
        ("merge out.npz a.matrices a.maps", "format='expertly-maps'"),
        ("merge out.npz a.maps a.matrices", "format='expertly-matrices'"),
        ("merge out.npz a.reuse", NOT_REUSE),
        ("merge out.npz a.maps a.reuse", NOT_REUSE),
        ("export a.reuse out.npz", NOT_REUSE),
        ("export a.maps c.json", "must end in .npz"),
        ("export a.maps absent/c.npz", "writing c.npz failed"),
        ("info cut.reuse", "reach beyond"),
    ],
)
def test_files_that_do_not_fit_are_refused(words, said, files, capsys):
    assert said in refused(capsys, *words.split())
    assert not Path("out.npz").exists()


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


def test_the_second_run_begins_with_what_the_first_learned(model: Path, tmp_path: Path, capsys: Captured) -> None:
    def run(*arguments: str) -> tuple[str, ...]:
        words = ("--prompt", "Once upon a time", "--memory", "50%", "--max-new-tokens", "20", *arguments)
        return "generate", str(model), *words

    path = str(tmp_path / "my.reuse")
    learning = ("--system", "expertly", "--learned", path)
    out = told(capsys, *run(*learning, "--stats"))
    assert f"[reuse: began with nothing learned: there was no {path} | " in out
    result = answer(capsys, *run(*learning))
    assert result["reuse"]["history"] == "warm"
    assert result["text"].rstrip("\n") == out[: out.index("\n[")].rstrip("\n")
    num_read, num = result["reuse"]["tokens_read"], result["reuse"]["tokens"]
    assert num == 2 * num_read > 0
    line = f"[reuse: began with what {num} tokens had taught: {path} | {3 * num_read} tokens by now]"
    assert line in told(capsys, *run(*learning, "--stats"))
    out = told(capsys, *run("--system", "expertly", "--learned", "off", "--stats"))
    assert f"[reuse: began with nothing learned: learned=off | {num_read} tokens by now]" in out
    assert answer(capsys, *run("--system", "lru"))["reuse"] is None, "lru learns nothing"
