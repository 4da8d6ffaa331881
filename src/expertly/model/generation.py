"""Arguments of transformers' `generate`, checked before anything runs, so that a refusal names the field."""

from __future__ import annotations

import copy
import os
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from expertly.core.errors import CheckpointError, ConfigError
from expertly.core.untrusted import read_json_object

FILE_NAME = "generation_config.json"

_FLAGS = ("do_sample", "use_cache", "token_healing", "remove_invalid_values")
_NUMBERS = (
    *("temperature", "top_p", "top_h", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "repetition_penalty"),
    *("encoder_repetition_penalty", "diversity_penalty", "length_penalty", "guidance_scale", "penalty_alpha"),
    "max_time",
)
_COUNTS = (
    *("top_k", "max_length", "max_new_tokens", "min_length", "min_new_tokens", "num_beams", "num_return_sequences"),
    *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"),
)
_TOKENS = (
    *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "forced_bos_token_id"),
    *("forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens"),
)


def _is_tokens(value: Any) -> bool:
    return type(value) is int or (isinstance(value, list) and all(type(one) is int for one in value))


def _is_texts(value: Any) -> bool:
    texts = value if isinstance(value, list) else [value]
    return bool(texts) and all(isinstance(one, str) and one for one in texts)


_KINDS: tuple[tuple[Sequence[str], Callable[[Any], bool], str], ...] = (
    (_FLAGS, lambda value: type(value) is bool, "true or false"),
    (_NUMBERS, lambda value: type(value) in (int, float), "a number"),
    (_COUNTS, lambda value: type(value) is int, "a whole number"),
    (_TOKENS, _is_tokens, "a token's number, or a list of them"),
    (("stop_strings",), _is_texts, "a text, or a list of them"),
)


def read_config(folder: str | os.PathLike[str], model_config: Path) -> GenerationConfig:
    """The generation config in a folder, else of the model's config, as in transformers. Refuses fields of a wrong
    type, on which that fails late or without naming the field. Raises CheckpointError naming file, field, value and
    what is accepted.
    """
    path = Path(folder) / FILE_NAME
    if not path.exists():
        return GenerationConfig.from_model_config(read_json_object(model_config, CheckpointError))
    found = read_json_object(path, CheckpointError)
    for names, is_right, accepted in _KINDS:
        for name in names:
            value = found.get(name)
            if value is not None and not is_right(value):
                raise CheckpointError(f"{path}: {name}={value!r:.80}: must be {accepted}")
    try:
        return GenerationConfig.from_pretrained(os.fspath(folder), local_files_only=True)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path}: transformers refuses it: {' '.join(str(error).split())}") from None


def generation_config(
    model: Any, max_new_tokens: int, temperature: float | None = 0.0, top_p: float | None = 1.0
) -> Any:
    """The model's own generation config for one sequence. None for both `temperature` and `top_p`: it samples as the
    model's config says. Otherwise it samples from the whole vocabulary, or is greedy at temperature 0.
    """
    config = copy.deepcopy(model.generation_config)
    config.max_length, config.max_new_tokens = None, max_new_tokens
    config.num_beams, config.num_return_sequences = 1, 1
    if temperature is None and top_p is None:
        temperature, top_p, top_k = config.temperature, config.top_p, config.top_k
        config.do_sample = bool(config.do_sample) and temperature != 0
    else:
        temperature, top_p, top_k = 1.0 if temperature is None else temperature, 1.0 if top_p is None else top_p, 0
        config.do_sample = temperature > 0
    config.temperature = temperature if config.do_sample else None
    config.top_p = top_p if config.do_sample else None
    config.top_k = max(0, top_k) if config.do_sample and top_k is not None else None  # many write -1 for all tokens
    if config.pad_token_id is None:
        end = config.eos_token_id
        config.pad_token_id = next(iter(end), None) if isinstance(end, list) else end
    return config


def stop_strings(model: Any) -> list[str]:
    """The texts that end a text, from the model's generation config."""
    found = getattr(model.generation_config, "stop_strings", None) or []
    return [found] if isinstance(found, str) else list(found)


def generate(model: Any, tokens: Sequence[int], config: Any, **more: Any) -> Any:
    """`model.generate` of one prompt; `more` are its other arguments.

    Raises ConfigError where a token is not the model's, or where `config` looks up and transformers cannot with this
    model; CheckpointError where transformers refuses what its generation_config.json says.
    """
    check_tokens(tokens, int(model.get_input_embeddings().num_embeddings))
    ids = torch.tensor([list(tokens)], device=model.device)
    try:
        return model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config, **more)
    except (TypeError, ValueError, IndexError, KeyError, AttributeError, RuntimeError) as error:
        *_, last = traceback.walk_tb(error.__traceback__)
        if not last[0].f_globals.get("__name__", "").startswith("transformers.generation."):
            raise
        reason = " ".join(str(error).split())
        if config.prompt_lookup_num_tokens is not None:
            raise ConfigError(
                f"speculate='prompt-lookup': transformers refuses it with this model: {reason}"
            ) from error
        raise CheckpointError(f"{model.config.name_or_path}: {FILE_NAME}: transformers refuses it: {reason}") from error


def check_tokens(tokens: Sequence[int], vocabulary: int, name: str = "prompt") -> None:
    """Refuse what is no text for a model of so many tokens. Raises ConfigError naming the token and what it may be."""
    check_some(tokens, name)
    if not 0 <= min(tokens) <= max(tokens) < vocabulary:
        wrong = max(tokens) if max(tokens) >= vocabulary else min(tokens)
        raise ConfigError(f"{name}: token {wrong}; accepted: 0 to {vocabulary - 1}: is the tokenizer another model's?")


def check_some(tokens: Sequence[int], name: str = "prompt") -> Sequence[int]:
    """The tokens. Raises ConfigError where there are none."""
    if not tokens:
        raise ConfigError(f"{name}: gives no token; write at least one word")
    return tokens


def max_positions(model: Any) -> int | None:
    """The most tokens of a text, if the model's config has a limit."""
    found = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return found if type(found) is int and found > 0 else None


def check_length(model: Any, max_new_tokens: int) -> None:
    """Raises ConfigError where an answer could be longer than the model's limit."""
    positions = max_positions(model)
    if positions is not None and max_new_tokens > positions:
        raise ConfigError(f"max_new_tokens={max_new_tokens}: accepted: at most the model's {positions} positions")
