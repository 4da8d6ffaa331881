"""A checkpoint's configs, edited: a run ends in one line that names the field, or in text."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.hostile.cases import edited, run_command
from tests.hostile.conftest import RunChanged

INFINITY, NAN = float("inf"), float("nan")
MANY = 200_000


def fields(**values: Any) -> Callable[[Path], None]:
    """The fields in config.json."""
    return edited("config.json", lambda config: config.update(values))


def rope(**values: Any) -> Callable[[Path], None]:
    return fields(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0} | values)


def text(content: str) -> Callable[[Path], None]:
    """All of config.json."""
    return lambda folder: (folder / "config.json").write_text(content) and None


def quantized(*value: Any, **values: Any) -> Callable[[Path], None]:
    return fields(quantization_config=value[0] if value else values)


GENERATION = "generation_config.json"


def generation(**values: Any) -> Callable[[Path], None]:
    """The fields in generation_config.json."""
    return edited(GENERATION, lambda config: config.update(values))


def in_config(**values: Any) -> Callable[[Path], None]:
    """Without a file of its own, they stand in config.json."""
    return lambda folder: (folder / GENERATION).unlink() or fields(**values)(folder)


def pipe(folder: Path) -> None:
    (folder / GENERATION).unlink()
    os.mkfifo(folder / GENERATION)


REFUSED: dict[str, tuple[Callable[[Path], None], str]] = {
    # sizes and counts
    "10^7 labels": (fields(num_labels=10**7), "num_labels=10000000"),
    "a head of 2^31": (fields(head_dim=2**31), "head_dim=2147483648"),
    "10^9 layers of a tower": (fields(vision_config={"depth": 10**9}), "vision_config.depth=1000000000"),
    "10^400": (fields(hidden_size=10**400), "hidden_size=1000"),
    "infinite heads": (fields(head_dim=INFINITY), "head_dim=inf"),
    "no heads": (fields(num_attention_heads=0), "num_attention_heads=0"),
    "one more word": (fields(vocab_size=129), "shape [128, 32], but config.json makes it [129, 32]"),
    "heads that do not divide": (fields(num_key_value_heads=3), "k_proj.weight"),
    # experts of a token
    "no experts a token": (fields(num_experts_per_tok=0), "config.json: num_experts_per_tok=0: must be 1 to 8"),
    # lists and depth
    "200 000 dense layers": (fields(mlp_only_layers=[*range(MANY)]), "mlp_only_layers: 200000 entries"),
    "200 000 architectures": (fields(architectures=["x"] * MANY), "architectures: 200000 entries"),
    "a long name": (fields(zzz="x" * 300_000), "zzz: 300000 characters"),
    "a very deep list": (text('{"x": ' + "[" * 200_000 + "]" * 200_000 + "}"), "config.json: not JSON"),
    "16 MiB": (text(" " * (17 << 20)), "config.json: 17825792 bytes"),
    # kinds
    "nested architectures": (fields(architectures=[["x"]]), "architectures=[['x']]"),
    "a path as family": (fields(model_type="../../etc"), "model_type='../../etc'"),
    "another family": (fields(model_type="bert"), "not a Mixture-of-Experts model"),
    "padding beyond the vocabulary": (fields(pad_token_id=10**6), "pad_token_id=1000000: must be below vocab_size"),
    "an encoder": (fields(is_encoder_decoder=True), "is_encoder_decoder=True: models of an encoder and a decoder"),
    "Switch": (fields(model_type="switch_transformers"), "models of an encoder and a decoder are not supported"),
    "NLLB": (fields(model_type="nllb-moe"), "models of an encoder and a decoder are not supported"),
    "a method's name": (fields(to_dict=3), "to_dict=3"),
    "a property's name": (fields(is_encoder=3, rope_parameters=None, rope_scaling="yarn"), "config.json: "),
    "a nonsense dtype": (fields(dtype="nonsense"), "config.json: dtype='nonsense'"),
    "not an object": (text("[]"), "must be an object"),
    # numbers of positions and norms
    "a factor of 0": (rope(factor=0.0), "rope_parameters.factor=0.0"),
    "theta NaN": (rope(rope_theta=NAN), "rope_theta=nan"),
    "an unknown activation": (fields(hidden_act="zzz"), "zzz"),
    "a window of 0": (fields(sliding_window=0, use_sliding_window=True), "sliding_window=0"),
    "layers that slide without a window": (
        fields(layer_types=["sliding_attention"] * 3),
        "sliding_window=None: must be",
    ),
    "epsilon NaN": (fields(rms_norm_eps=NAN), "rms_norm_eps=nan"),
    # quantisation
    "an unknown method": (quantized(quant_method="zzz"), "config.json: quantization_config.quant_method='zzz'"),
    "10^9 bits": (quantized(quant_method="gptq", bits=10**9), "config.json: quantization_config.bits=1000000000"),
    "blocks of 0": (quantized(quant_method="fp8", weight_block_size=[0, 0]), "weight_block_size"),
    # how it generates
    "10 000 stop strings": (generation(stop_strings=[str(at) for at in range(10**4)]), "stop_strings: 10000 entries"),
    "a stop string of 10^6": (generation(stop_strings="x" * 10**6), "stop_strings: 1000000 characters"),
    "a length of 2^70": (generation(max_length=2**70), "max_length=1180591620717411303424"),
    "temperature NaN": (generation(temperature=NAN), "temperature=nan"),
    "top_p of 5": (generation(top_p=5), "top_p=5: must be a number from 0 to 1"),
    "an end of text": (generation(eos_token_id=[1, "a"]), "eos_token_id=[1, 'a']"),
    "a suppressed token beyond": (generation(suppress_tokens=[10**6]), "suppress_tokens=[1000000]"),
    "a bias of a token": (generation(sequence_bias=[[5, 1.0]]), "sequence_bias=[[5, 1.0]]"),
    "a pipe": (pipe, f"{GENERATION}: a pipe"),
    "temperature NaN in config.json": (in_config(temperature=NAN), "config.json: temperature=nan"),
}
"""Of each case its change, and what is said of it."""

LARGE = {*[*REFUSED][:4], "200 000 dense layers", "200 000 architectures", "a long name", "a very deep list", "16 MiB"}
LARGE |= {"10 000 stop strings", "a stop string of 10^6"}
"""What could take memory or time."""

RUNS: dict[str, Callable[[Path], None]] = {
    "code and kernels of a hub": fields(
        auto_map={"AutoConfig": "owner/it--x.Y"}, attn_implementation="owner/kernel", _experts_implementation="owner/k"
    ),
    "another attention, and no dictionaries": fields(
        _attn_implementation="flash_attention_2", return_dict=False, use_return_dict=False, torchscript=True
    ),
    "how it was trained": fields(
        output_hidden_states=True, output_attentions=True, output_router_logits=True, problem_type=5, pruned_heads=5,
        id2label=["x"], label2id=5, sub_configs={"a": 1}, attribute_map={"hidden_size": "vocab_size"}, __class__="x",
    ),
    "fields by the names of older releases": fields(
        torch_dtype="float32", rope_scaling=None, rope_theta=1e4, rope_parameters=None, architectures=None
    ),
    "no quantisation": quantized({}),
    "endless positions": fields(max_position_embeddings=10**18, transformers_version=5, bos_token_id=10**6),
    "unknown classes": fields(architectures=["pipeline", "a.b", "", "MixtralForCausalLM"]),
    "with a mark": lambda folder: (folder / "config.json").write_bytes(
        b"\xef\xbb\xbf" + (folder / "config.json").read_bytes()
    )
    and None,
}  # fmt: skip
"""What a config says of how somebody ran it is not obeyed."""


OF_GENERATION: dict[str, Callable[[Path], None]] = {
    "code, caches and models of a hub": generation(
        custom_generate="owner/it", trust_remote_code=True, cache_implementation="zzz", assistant_early_exit=1,
        compile_config={"backend": "x"}, penalty_alpha=0.6, constraints=[1], prompt_lookup_num_tokens=10**9,
        continuous_batching_config={"a": 1}, output_scores=True, return_dict_in_generate=True,
    ),
    "what nobody knows": generation(validate=5, to_dict=5, __class__="x", chat_format="chatml", _from_model_config=5),
    "an endless text, padded with nothing": generation(max_length=2**62, pad_token_id=-1, top_k=-1, eos_token_id=10**9),
}  # fmt: skip
"""Only what changes a text is read."""


@pytest.fixture(scope="module")
def unchanged(imported: Any, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The text of the model as it is."""
    words = ("run", str(checkpoint), "hello", "--max-new-tokens", "4")
    return run_command(imported, tmp_path_factory.mktemp("unchanged"), *words).out.splitlines()[0]


@pytest.mark.parametrize("name", REFUSED)
def test_a_config_that_cannot_be_is_refused_by_its_field(name: str, run_changed: RunChanged) -> None:
    change, sentence = REFUSED[name]
    run_changed(change, is_large=name in LARGE).is_refused(sentence)


@pytest.mark.parametrize("name", [*RUNS, *OF_GENERATION])
def test_fields_of_a_run_are_not_obeyed(name: str, unchanged: str, run_changed: RunChanged) -> None:
    answer = run_changed((RUNS | OF_GENERATION)[name])
    answer.is_answered()
    assert answer.out.splitlines()[0] == unchanged or name in OF_GENERATION


@pytest.mark.parametrize("command", ["doctor m", "pack m --out store", "serve m", "doctor m/config.json"])
def test_every_command_refuses_it_alike(command: str, checkpoint: Path, imported: Any, tmp_path: Path) -> None:
    """Also of a config without weights."""
    fields(head_dim=2**31)(shutil.copytree(checkpoint, tmp_path / "m"))
    run_command(imported, tmp_path, *command.split()).is_refused("config.json: head_dim=2147483648")
