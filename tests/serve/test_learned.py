"""What a server of `expertly` says of what it has learned, before and after it was started again."""

from __future__ import annotations

import time
from pathlib import Path

import expertly
from tests.serve.conftest import served


def test_a_server_that_comes_back_knows_what_it_had_learned(tmp_path: Path) -> None:
    texts, num_learned = [], 0.0
    for history in ("cold", "warm"):
        model, tokenizer = expertly.load(
            memory="30%", dtype="float32", device="cpu", system="expertly", learned=tmp_path / "my.reuse"
        )
        try:
            with served(model, tokenizer) as serving, serving.http() as http:
                assert http.get("/v1/state").json()["history"] == history
                assert serving.metrics()["expertly_reuse_tokens_read"] == num_learned
                texts.append(serving.complete("The old man looked at the sea", 24).choices[0].text)
                time.sleep(0.3)  # metrics are up to a quarter of a second old
                before, num_learned = num_learned, serving.metrics()["expertly_reuse_tokens"]
                assert num_learned >= before + 24
        finally:
            expertly.unload(model)
        num_learned = float(expertly.stats(model).as_dict()["reuse"]["tokens"])
    assert texts[0] == texts[1] != ""
