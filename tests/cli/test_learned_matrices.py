"""`expertly lab learned` of activation matrices: what it makes, what it says, what it refuses."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from expertly.cli.main import main
from expertly.core.geometry import Geometry, LayerGeometry
from expertly.policies.learned import read_learned, save_learned
from expertly.policies.predictor.eam import EAM
from expertly.policies.predictor.eam.matrices import Matrices
from expertly.sim.schedule import Selection, make_schedule
from expertly.sim.training import histories
from expertly.trace.reader import Trace
from tests.cli.test_learned_maps import LAYERS, LENGTHS, make_trace, printed, refused
from tests.policies.learned_builders import IDENTITY, assert_same_state, make_matrices, make_store


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Two files of one model, and one of maps."""
    paths = [tmp_path / "a.matrices", tmp_path / "b.matrices", tmp_path / "c.maps"]
    save_learned(paths[0], make_matrices(), IDENTITY, {"model": "toy", "source": "a test"})
    save_learned(paths[1], make_matrices(1, 3, 5, seed=1), IDENTITY)
    save_learned(paths[2], make_store(), IDENTITY)
    return paths


def test_info_says_what_there_is(files, capsys):
    facts = printed(capsys, "info", files[0])
    assert (facts["prefill_matrices"], facts["decode_matrices"], facts["capacity"]) == (4, 6, 8)
    assert facts["coverage"][1] == {"similarity": 0.98, "matrices": math.ceil(11 * math.log(22))}
    assert facts["decode_tokens"] == int(make_matrices().decode.total[0].sum()) // 2
    assert (facts["matrices_bytes"], facts["full_matrices_bytes"]) == (10 * 3 * 8 * 8, 16 * 3 * 8 * 8)
    assert facts["file_bytes"] == files[0].stat().st_size


def test_info_says_the_same_to_people(files, capsys):
    assert main(["lab", "learned", "info", str(files[0])]) == 0
    out = capsys.readouterr().out
    assert "[toy | 3 layers of 6 to 8 experts, top-2 to 3 | matrices of 4 prompts and 6 answers | at most 8 each" in out
    assert "2 L E = 44 of them; here are 9.1%" in out and "6 of at most 8 matrices" in out
    save_learned(files[0], make_matrices(), IDENTITY, {"model": "\x1b[2J"})
    assert main(["lab", "learned", "info", str(files[0])]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_merge(files, tmp_path, capsys):
    out = tmp_path / "d.matrices"
    facts = printed(capsys, "merge", out, *files[:2])
    assert (facts["prefill_matrices"], facts["decode_matrices"], facts["capacity"]) == (5, 8, 8)
    assert facts["identity"] == IDENTITY and str(files[1]) in facts["about"]["source"]
    facts = printed(capsys, "merge", out, *files[:2], "--capacity", 20)
    assert facts["decode_matrices"] == 9 == read_learned(out, Matrices, identity=IDENTITY).learned.decode.num_matrices
    facts = printed(capsys, "merge", out, out, "--capacity", 3)
    assert (facts["prefill_matrices"], facts["decode_matrices"], facts["file"]) == (3, 3, str(out))


def test_kinds_do_not_mix(files, tmp_path, capsys):
    out = tmp_path / "d"
    assert "format='expertly-maps'" in refused(capsys, "merge", out, files[0], files[2])
    assert "format='expertly-matrices'" in refused(capsys, "merge", out, files[2], files[0])
    save_learned(files[1], make_matrices(), "5" * 64)
    assert "b.matrices: identity='5555" in refused(capsys, "merge", out, files[0], files[1])
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
