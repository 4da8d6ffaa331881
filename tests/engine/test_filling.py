"""What layers lack since their shares changed is loaded while the readers are idle, and no token changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import expertly
from expertly.api import handle
from expertly.scheduler.decisions import replay_file
from tests.engine.conftest import Cases
from tests.families import generate


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_what_is_kept_is_filled_while_nothing_else_is_read_and_is_decided_again(
    family: str, cases: Cases, tmp_path: Path
) -> None:
    case, path = cases[family], tmp_path / "decisions.jsonl"
    model, _ = expertly.load(
        str(case.store), memory="60%", system="moepic:tau=2:fill=idle", segments=4, device="cpu", decisions=path
    )
    engine = handle(model).engine
    begin = engine.begin_iteration

    def begin_iteration(info: Any) -> None:
        for device in engine.executor.devices:
            if device.configuring._thread is not None:
                device.configuring._thread.join()
        begin(info)
        engine.scheduler.check()

    engine.begin_iteration = begin_iteration
    for _ in range(3):
        assert generate(model, case.prompts) == case.tokens
    phases = expertly.stats(model).as_dict()["phases"]
    expertly.unload(model)
    assert replay_file(path)[1].difference is None
    assert phases["decode"]["filled_bytes"] > 0 and not phases["prefill"]["filled_bytes"]
    assert phases["decode"]["filled_bytes"] < phases["decode"]["bytes_loaded"]
