"""MoE-Infinity in the engine: lossless, and what goes is what its matrices say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import expertly
from expertly.api import handle
from expertly.policies.eviction.eam import EAMEviction
from expertly.scheduler.decisions import replay_file
from tests.engine.conftest import Cases
from tests.engine.observe import loaded
from tests.engine.test_batching import run_batch
from tests.families import NUM_EXPERTS, generate, load_reference, logits_of, make_prompts

pytestmark = pytest.mark.timeout(120)

SYSTEM = "moe-infinity"


def stats_of(model: Any) -> dict[str, Any]:
    found = expertly.stats(model).as_dict()
    assert isinstance(found, dict)
    return found


def of_phases(model: Any, name: str) -> int:
    """A counter, over both phases."""
    return sum(int(phase[name]) for phase in stats_of(model)["phases"].values())


@pytest.mark.parametrize("matcher", ["thread", "inline"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "jamba", "switch_transformers"])
def test_tokens_and_logits_are_those_of_the_reference(family: str, matcher: str, cases: Cases) -> None:
    case = cases[family]
    with loaded(case.store, system=SYSTEM, memory="30%", segments=4, matcher=matcher) as model:
        for _ in range(3):  # from the second on there are matrices
            assert generate(model, case.prompts) == case.tokens
        torch.testing.assert_close(logits_of(model, case.prompts), case.logits, rtol=1e-4, atol=1e-5)
        facts = stats_of(model)["prediction"]
        assert facts["failed"] is None and facts["predictor"]["prefill_matrices"] > 0
        assert of_phases(model, "predicted") > 0
        if matcher == "inline" and family != "switch_transformers":  # beside the pass it may be late; there it is here
            assert of_phases(model, "prefetched") > 0
        assert stats_of(model)["memory_bytes"] < stats_of(model)["expert_bytes"]


def test_batches_are_lossless_whose_requests_come_and_go(cases: Cases) -> None:
    case = cases["qwen3_moe"]
    prompts = [*make_prompts(2, length=5, seed=2), *make_prompts(1, length=20, seed=3)]
    reference = load_reference(case.folder)
    expected = [generate(reference, [prompt], 6)[0] for prompt in prompts]
    with loaded(case.store, system=SYSTEM, memory="50%", matcher="inline") as model:
        for _ in range(2):
            assert run_batch(model, prompts) == expected
        assert stats_of(model)["prediction"]["predictor"]["searches"] > 0


def test_what_goes_is_what_the_matrices_say(cases: Cases) -> None:
    """Experts were evicted by algorithm 1, of the outlook that the predictor gave last."""
    case = cases["qwen3_moe"]
    with loaded(case.store, system=SYSTEM, memory="50%", matcher="inline") as model:
        for _ in range(3):
            generate(model, case.prompts[:1])
        scheduler = handle(model).engine.scheduler
        policy = scheduler.cache.partitions[0].policy
        assert isinstance(policy, EAMEviction) and policy._has_outlook
        assert policy._likely.any() and of_phases(model, "evicted_bytes") > 0


def test_what_was_decided_is_decided_again(cases: Cases, tmp_path: Path) -> None:
    case, path = cases["mixtral"], tmp_path / "decisions.jsonl"
    model, _ = expertly.load(
        str(case.store), system=SYSTEM, memory="50%", decisions=path, matcher="inline", maps="off", device="cpu"
    )
    for _ in range(3):
        assert generate(model, case.prompts) == case.tokens
    expertly.unload(model)
    calls = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    outlooks = [call[1][-1] for call in calls if call[0] == "predict" and isinstance(call[1][-1], list)]
    assert any(len(outlook) == 3 * NUM_EXPERTS for outlook in outlooks), "of all three layers"
    assert replay_file(path)[1].difference is None
