"""The vocabulary in a GGUF file: checked, which of its tokens end an answer, and as a tokenizer of transformers."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import transformers
from tokenizers import Regex, pre_tokenizers

from expertly.core.errors import CheckpointError, UnsupportedModelError
from expertly.model.loading import tokenizer_errors
from expertly.model.structure import quiet
from expertly.store.gguf import GgufFiles, GgufList

_NONE = ("none", "no_vocab")
_MODELS = {"gpt2": "merges", "llama": "scores", "gemma4": "merges"}
"""Values of `tokenizer.ggml.model` besides _NONE, and the list that such a vocabulary needs beside its tokens."""

_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_BEGIN = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+"
_END = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_NOT_HAN = r"\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_SHORT = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
KIMI_PATTERN = (
    rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{_NOT_HAN}*[\p{{Ll}}{_NOT_HAN}+{_SHORT}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}{_NOT_HAN}+[\p{{Ll}}{_NOT_HAN}*{_SHORT}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {
    "deepseek-v3": (
        r"\p{N}{1,3}",
        "[一-龥\u3040-ゟ゠-ヿ]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "exaone-moe": (
        _BEGIN.removesuffix(r"\p{L}+") + r"(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
    ),
    **dict.fromkeys(("glm4", "chatglm-bpe"), (rf"{_BEGIN}|\p{{N}}{{1,3}}|{_END}",)),
    **dict.fromkeys(("hunyuan", "bailingmoe", "bailingmoe2"), (rf"{_BEGIN}|\p{{N}}|{_END}",)),
    "kimi-k2": (KIMI_PATTERN,),
    "deepseek-llm": (
        "[\r\n]",
        r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
        r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
        r"\p{N}+",
    ),
    "olmo": (_WORDS,),
    "refact": (r"\p{N}", _WORDS),
}
"""llama.cpp's patterns, one after another, of values of `tokenizer.ggml.pre` that transformers does not know."""

_MOST_MERGES = 16
"""Of a token, which several pairs may make: gpt-oss has 2.2."""

_IDS = {"bos": "bos", "eos": "eos", "pad": "padding"}
"""Fields of a config, and of the metadata."""

_ENDING_IDS = ("eos", "eot", "eom")

_ENDS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
    *("<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>"),
    *("<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>"),
)
"""Texts of tokens that end an answer, as in llama.cpp."""

_GO_ON = {"<|end|>": ({"<|return|>", "<|call|>"}, {"<|calls|>", "<|flush|>"}), "</s>": ({"<|tool_response>"},)}
"""Those that end no answer in vocabularies which have one of these sets, too: gpt-oss ends each message by <|end|>."""

_CONTROL = 3
"""Of `tokenizer.ggml.token_type`."""


def check_words(files: GgufFiles, num_rows: int, splits: Sequence[str]) -> list[str]:
    """The texts of a file's tokens; empty where it has no vocabulary. `num_rows`: of the table of embeddings; `splits`:
    accepted of `tokenizer.ggml.pre`. Raises CheckpointError naming the key.
    """
    said = files.metadata
    model = said.get("tokenizer.ggml.model", "none")
    if model in _NONE:
        return []
    if not isinstance(model, str) or model not in _MODELS:
        accepted = ", ".join((*_MODELS, *_NONE))
        raise UnsupportedModelError(f"{files.path}: tokenizer.ggml.model={model!r:.80}: accepted: {accepted}")
    if model == "gpt2":
        split = said.get("tokenizer.ggml.pre")
        accepted_splits = dict.fromkeys((*splits, *_SPLITS, *_known_splits()))
        if not isinstance(split, str) or split not in accepted_splits:
            listed = ", ".join(accepted_splits)
            raise UnsupportedModelError(f"{files.path}: tokenizer.ggml.pre={split!r:.80}: accepted: {listed}")
    tokens = _list(files, "tokens")
    if not 0 < len(tokens) <= num_rows:
        raise CheckpointError(
            f"{files.path}: tokenizer.ggml.tokens: {len(tokens)} tokens: must be 1 to {num_rows}, the rows of "
            "token_embd.weight"
        )
    num, label = len(tokens), f"{files.path}: tokenizer.ggml"
    further = _list(files, _MODELS[model])
    if len(further) > _MOST_MERGES * num:
        accepted = f"accepted: {_MOST_MERGES} for each of {num} tokens"
        raise CheckpointError(f"{label}.{_MODELS[model]}: {len(further)} entries; {accepted}")
    for name in ("scores", "token_type"):
        if f"tokenizer.ggml.{name}" in said and (length := len(_list(files, name))) != num:
            raise CheckpointError(f"{label}.{name}: {length} entries: must be {num}, one for each token")
    for key, value in said.items():
        is_template = key == "tokenizer.chat_template" or key.startswith("tokenizer.chat_template.")
        is_flag = key.startswith("tokenizer.ggml.add_") or key == "tokenizer.ggml.remove_extra_whitespaces"
        if (is_template and not isinstance(value, str)) or (is_flag and type(value) is not bool):
            accepted = "a string" if is_template else "true or false"
            raise CheckpointError(f"{files.path}: {key:.80}={value!r:.80}: must be {accepted}")
    return tokens.texts()


def special_tokens(files: GgufFiles, num_rows: int, words: Sequence[str]) -> dict[str, Any]:
    """The config's fields for tokens: of `eos_token_id` all that end an answer, in a list where they are several.
    `words`: of `check_words`. Raises CheckpointError for a number that is no token's.
    """
    num_tokens = len(words) or num_rows
    ids = {name: _id(files, name, num_tokens) for name in (*_IDS.values(), *_ENDING_IDS, "unknown")}
    ends = dict.fromkeys(ids[name] for name in _ENDING_IDS if ids[name] is not None)
    if "tokenizer.ggml.token_type" in files.metadata and words:
        control = set((_list(files, "token_type").numbers() == _CONTROL).nonzero()[0].tolist())
        texts = {text: number for number, text in enumerate(words) if number in control}
        ends |= dict.fromkeys(texts[text] for text in _ENDS if text in texts)
        for text, sets in _GO_ON.items():
            if text in texts and any(beside <= texts.keys() for beside in sets):
                ends.pop(texts[text], None)
    fields: dict[str, Any] = {f"{field}_token_id": ids[name] for field, name in _IDS.items()}
    fields["eos_token_id"] = list(ends) if len(ends) > 1 else next(iter(ends), None)
    return fields


def _id(files: GgufFiles, name: str, num_tokens: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    value: Any = files.metadata.get(key)
    if value is not None and (type(value) is not int or not 0 <= value < num_tokens):
        raise CheckpointError(f"{files.path}: {key}={value!r:.80}: must be a token's number, 0 to {num_tokens - 1}")
    return value


def _list(files: GgufFiles, name: str) -> GgufList:
    """A list of the vocabulary. Raises CheckpointError where it is none, or one of other values."""
    key = f"tokenizer.ggml.{name}"
    value, is_text = files.metadata.get(key), name in ("tokens", "merges")
    if not isinstance(value, GgufList) or value.is_text != is_text:
        raise CheckpointError(
            f"{files.path}: {key}={value!r:.80}: must be a list of {'texts' if is_text else 'numbers'}"
        )
    return value


def _known_splits() -> Mapping[str, str]:
    """Those that this transformers has a pattern for; before 5.24 it went by the architecture alone."""
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    except ImportError:
        return {}
    return GGUF_PRE_TOKENIZER_SPLITS  # type: ignore[no-any-return]


@contextlib.contextmanager
def tokenizer_folder(files: GgufFiles, class_name: str) -> Iterator[Path]:
    """A folder with a file's tokenizer, as transformers' class of this name writes it; empty where it has none."""
    with tempfile.TemporaryDirectory(prefix="expertly-") as made:
        if files.metadata.get("tokenizer.ggml.model", "none") not in _NONE:
            link = Path(made) / "model.gguf"  # alone in its folder: transformers reads what lies beside it, too
            link.symlink_to(files.path.absolute())
            with tokenizer_errors(f"{files.path}: its tokenizer cannot be read"), quiet():
                pre = files.metadata.get("tokenizer.ggml.pre")
                is_usual = pre in (None, "qwen2")  # a family's class has its own way to split text
                reader = getattr(transformers, class_name) if is_usual else transformers.PreTrainedTokenizerFast
                tokenizer = reader.from_pretrained(made, gguf_file=link.name, local_files_only=True)
                split = _SPLITS.get(pre or "")
                if split is not None and files.metadata["tokenizer.ggml.model"] == "gpt2":
                    by_patterns = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split]
                    of_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
                    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*by_patterns, of_bytes])
                link.unlink()
                tokenizer.save_pretrained(made)
        yield Path(made)
