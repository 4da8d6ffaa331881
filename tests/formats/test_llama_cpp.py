"""llama.cpp and the product have the same greedy tokens of the same file, of every GGUF architecture."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from expertly.model.packing import pack
from tests.engine.observe import loaded
from tests.families import NUM_NEW_TOKENS, generate, make_prompts
from tests.formats.gguf_files import ARCHITECTURES, WORDS, make_gguf
from tests.formats.gguf_models import CASES, VOCABULARY, make_model, write_model
from tests.golden.llama_cpp import REFUSED, UNLIKE, tokens_of

pytestmark = pytest.mark.skipif(find_spec("xllamacpp") is None, reason="xllamacpp is not there: make test-peers")


def _write(name: str, path: Path) -> Path:
    """In float32: llama.cpp rounds what it multiplies by blocks."""
    if name in CASES:
        return write_model(path, make_model(CASES[name]), CASES[name], metadata=VOCABULARY)
    plain: dict[str, str | None] = {f"blk.{layer}.attn_output.weight": "F32" for layer in range(3)}
    return make_gguf(path, "F32", dense="F32", architecture=name, words=WORDS, others=plain)


@pytest.mark.parametrize("name", [*CASES, *ARCHITECTURES.values()])
def test_llama_cpp_computes_the_same_tokens_unless_it_is_said_to_be_unlike(name: str, tmp_path: Path) -> None:
    path, prompt = _write(name, tmp_path / "model.gguf"), make_prompts(1, length=40)[0]
    if name in REFUSED:
        with pytest.raises(RuntimeError, match=re.escape(REFUSED[name])):
            tokens_of(path, prompt, NUM_NEW_TOKENS)
        return
    with loaded(pack(path, tmp_path / "store").folder, memory="50%") as model:
        tokens = generate(model, [prompt])[0]
    if name in UNLIKE:
        assert tokens_of(path, prompt, NUM_NEW_TOKENS) != tokens, f"no longer unlike: {UNLIKE[name]}"
    else:
        assert tokens_of(path, prompt, NUM_NEW_TOKENS) == tokens
