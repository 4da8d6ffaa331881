"""Arguments of transformers' `generate`, checked before anything runs, so that a refusal names the field."""

from __future__ import annotations

import copy
import math
import os
import traceback
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.cache_utils import Cache

from expertly.core.errors import CheckpointError, ConfigError
from expertly.core.untrusted import CONFIG, GENERATION, read_json_object
from expertly.model.hooks import CACHE
from expertly.model.structure import first_line, quiet

FILE_NAME = "generation_config.json"

NUM_DRAFTED = 7
"""Tokens that prompt lookup drafts: with the token before them a pass has 8 rows."""

_MAX_STOPS, _MAX_STOP = 16, 256
"""Stop strings, and characters of each: transformers compares each with each token of the vocabulary."""

_MAX_BEAMS = 256

# names of fields, by what they may be
_FLAGS = "do_sample use_cache token_healing remove_invalid_values renormalize_logits"
_SHARES = "top_p top_h min_p typical_p epsilon_cutoff eta_cutoff"
_COUNTS = "top_k max_length max_new_tokens min_length min_new_tokens no_repeat_ngram_size encoder_no_repeat_ngram_size"
_TOKENS = "decoder_start_token_id forced_bos_token_id forced_eos_token_id suppress_tokens begin_suppress_tokens"


def _is_number(value: Any, least: float = -math.inf, most: float = math.inf) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and least <= value <= most


def _is_whole(value: Any, least: int, most: int) -> bool:
    return type(value) is int and least <= value <= most


def _are_whole(value: Any, least: int, most: int) -> bool:
    return all(_is_whole(item, least, most) for item in (value if isinstance(value, list) else [value]))


def _is_texts(value: Any) -> bool:
    texts = value if isinstance(value, list) else [value]
    return 0 < len(texts) <= _MAX_STOPS and all(isinstance(text, str) and 0 < len(text) <= _MAX_STOP for text in texts)


def _kinds(vocabulary: int) -> tuple[tuple[str, Callable[[Any], bool], str], ...]:
    """Fields that change a text, with what they may be."""

    def is_sequence(value: Any) -> bool:
        return isinstance(value, list) and bool(value) and _are_whole(value, 0, vocabulary - 1)

    def are_pairs(value: Any) -> bool:
        pairs = value if isinstance(value, list) and value else [None]
        return all(
            isinstance(pair, list) and len(pair) == 2 and is_sequence(pair[0]) and _is_number(pair[1]) for pair in pairs
        )

    def is_penalty(value: Any) -> bool:
        return isinstance(value, list) and len(value) == 2 and type(value[0]) is int and _is_number(value[1])

    tokens = "a token's number, or a list of them"
    return (
        (_FLAGS, lambda value: type(value) is bool, "true or false"),
        (_SHARES, lambda value: _is_number(value, 0, 1), "a number from 0 to 1"),
        ("repetition_penalty encoder_repetition_penalty", lambda value: _is_number(value, 1e-6), "a number above 0"),
        ("length_penalty guidance_scale", _is_number, "a number"),
        ("temperature max_time", lambda value: _is_number(value, 0), "a number from 0"),
        (_COUNTS, lambda value: _is_whole(value, -1, (1 << 63) - 1), "a whole number"),
        ("num_beams num_return_sequences", lambda value: _is_whole(value, 1, _MAX_BEAMS), f"1 to {_MAX_BEAMS}"),
        ("bos_token_id eos_token_id pad_token_id", lambda value: _are_whole(value, -1, (1 << 63) - 1), tokens),
        (_TOKENS, lambda value: _are_whole(value, 0, vocabulary - 1), f"{tokens}, of {vocabulary}"),
        ("stop_strings", _is_texts, f"a text of at most {_MAX_STOP} characters, or a list of at most {_MAX_STOPS}"),
        ("early_stopping", lambda value: type(value) is bool or value == "never", 'true, false or "never"'),
        (
            "bad_words_ids",
            lambda value: isinstance(value, list) and bool(value) and all(map(is_sequence, value)),
            f"lists of tokens, of {vocabulary}",
        ),
        ("sequence_bias", are_pairs, f"pairs of a list of tokens, of {vocabulary}, and a number"),
        ("exponential_decay_length_penalty", is_penalty, "a whole number and a number"),
        ("watermarking_config", lambda value: isinstance(value, dict), "an object"),
    )


def read_config(folder: str | os.PathLike[str], model_config: Path, vocabulary: int) -> GenerationConfig:
    """The generation config in a folder, else of the model's config, as in transformers. Only fields that change a text
    are read: others say how somebody ran the model, some of them by code of the hub. Raises CheckpointError naming
    file, field, value and what is accepted.
    """
    path = Path(folder) / FILE_NAME
    is_own = os.path.lexists(path)
    path = path if is_own else model_config
    said = read_json_object(path, CheckpointError, GENERATION if is_own else CONFIG)
    if not is_own:
        inner = next((said[name] for name in ("decoder", "generator", "text_config") if said.get(name)), None)
        said = {**(inner if isinstance(inner, dict) else {}), **{k: v for k, v in said.items() if v is not None}}
    fields = {}
    for names, is_right, accepted in _kinds(vocabulary):
        for name in names.split():
            if (value := said.get(name)) is None:
                continue
            if not is_right(value):
                raise CheckpointError(f"{path}: {name}={value!r:.80}: must be {accepted}")
            fields[name] = value
    if _are_whole(fields.get("pad_token_id"), -1, -1):  # as some write that there is none
        del fields["pad_token_id"]
    try:
        with quiet():
            config = GenerationConfig.from_dict(fields | ({} if is_own else {"_from_model_config": True}))
    except Exception as cause:  # whatever transformers' own classes for some of the fields meet
        raise CheckpointError(f"{path}: transformers refuses it: {first_line(cause)}") from None
    config._original_object_hash = hash(config)  # as `from_pretrained` does
    return config


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
    texts = getattr(model.generation_config, "stop_strings", None) or []
    return [texts] if isinstance(texts, str) else list(texts)


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
        module = last[0].f_globals.get("__name__", "")
        if not module.startswith(("transformers.generation.", "transformers.cache_utils")):
            raise
        reason = " ".join(str(error).split())
        if config.prompt_lookup_num_tokens is not None:
            problem = f"speculate='prompt-lookup': transformers refuses it with this model: {reason}"
            raise ConfigError(problem) from error
        name = FILE_NAME if "generation" in module else "config.json"
        raise CheckpointError(f"{model.config.name_or_path}: {name}: transformers refuses it: {reason}") from error


_GO_ON = ("deepseek_v4", "lfm2_moe", "qwen3_next") if hasattr(Cache, "is_recording_past") else ()
"""Families whose states go on by several tokens at a time, in a transformers whose caches can say so. Those of others,
as Jamba's and MiniMax's, go on by one token, or begin anew.
"""


class KeptCache:
    """The KV cache of the last text, for the next one that begins alike."""

    def __init__(self, model: Any) -> None:
        self._goes_on = model.config.get_text_config().model_type in _GO_ON
        self._cache: Any = None
        self._tokens: list[int] = []  # that it holds

    def take(self, tokens: Sequence[int]) -> tuple[Any, int]:
        """The cache, cut to what it shares with `tokens[:-1]`, and how many tokens those are; None and 0 where there is
        nothing, or a layer cannot go back that far. From then on it is the caller's.
        """
        cache, kept = self._cache, self._tokens
        self._cache, self._tokens = None, []
        num_same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(kept, tokens[:-1], strict=False)))
        if num_same < len(kept):
            try:
                if _is_plain(cache):
                    cache.crop(num_same - len(kept))  # below 0: so many go
                else:
                    cache = None
            except (AttributeError, NotImplementedError, RuntimeError, ValueError):  # of a kind that cannot go back
                cache = None
        return (None, 0) if cache is None or not num_same else (cache, num_same)

    def keep(self, made: Any) -> None:
        """Keep that of an answer, as `generate` returns it in a dictionary."""
        cache, tokens = getattr(made, CACHE), made.sequences[0].tolist()
        if self._goes_on or _is_plain(cache):
            self._cache, self._tokens = cache, tokens[:-1]  # the last token was not computed with


def _is_plain(cache: Any) -> bool:
    """Whether it holds only keys and values, by token: cutting a family's own kind of cache leaves its other states."""
    parts = cache, *getattr(cache, "layers", ())
    return not any(hasattr(part, "conv_states") or ".models." in type(part).__module__ for part in parts)


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
    most = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return most if type(most) is int and most > 0 else None


def check_length(model: Any, max_new_tokens: int) -> None:
    """Raises ConfigError where an answer could be longer than the model's limit."""
    positions = max_positions(model)
    if positions is not None and max_new_tokens > positions:
        raise ConfigError(f"max_new_tokens={max_new_tokens}: accepted: at most the model's {positions} positions")
