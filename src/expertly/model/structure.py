"""The structure of a model: its config and class, the place and shape of its experts, the bytes of the rest.

It is found in the model itself, not in a table of families.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from expertly.core.errors import CheckpointError, UnsupportedModelError
from expertly.core.geometry import DenseShape, LayerGeometry
from expertly.core.untrusted import CONFIG, read_json_object
from expertly.model.hooks import experts_modules
from expertly.model.trial import Calls, try_experts

_SUPPORTED = "supported: families on transformers' experts interface (mixtral, qwen3_moe, gpt_oss, ...)"
_NO_TEXT_UPSTREAM = {"Llama4ForConditionalGeneration"}
"""Models of images and text that fail on any text in transformers 5.24: their text model runs alone."""


@dataclass(frozen=True, slots=True)
class ExpertsSite:
    """One experts module: its path, the layout of its weights in transformers, and its geometry.

    Two parameters `{name}.{weight_names[i]}` hold all experts, `[E, 2I, H]` and `[E, H, I]` (`is_transposed`:
    `[E, H, 2I]` and `[E, I, H]`; without a gate I for 2I). `is_concatenated`: gate rows, then up rows; else interleaved
    gate 0, up 0, gate 1, ...
    """

    name: str  # module path, e.g. model.layers.3.mlp.experts
    geometry: LayerGeometry
    is_transposed: bool
    is_concatenated: bool
    has_gate: bool
    weight_names: tuple[str, str]  # ("gate_up_proj", "down_proj"), ("up_proj", "down_proj")
    calls: Calls | None = None  # of a class that is not on transformers' interface

    @property
    def parameters(self) -> tuple[str, str]:
        """Full names of the parameters."""
        return f"{self.name}.{self.weight_names[0]}", f"{self.name}.{self.weight_names[1]}"


_OF_A_RUN = re.compile(
    r"_.*|(attn|experts)_implementation|(use_)?return_dict|output_(attentions|hidden_states|router_logits)|torchscript|"
    r"gradient_checkpointing|pruned_heads|problem_type|finetuning_task|id2label|label2id|num_labels|auto_map|"
    r"attribute_map|sub_configs|base_config_key|keys_to_ignore_at_inference|has_no_defaults_at_init|base_model_\w+_plan"
)
"""Fields of config.json that say nothing of a model's text: how somebody ran or trained it, and names of code. They are
not passed on to transformers, which would obey some of them.
"""


def read_config(folder: str | os.PathLike[str]) -> PreTrainedConfig:
    """The config of a checkpoint folder. Raises CheckpointError or UnsupportedModelError with the reason."""
    path = Path(folder) / "config.json"
    if not os.path.lexists(path):
        raise CheckpointError(f"{folder}: no config.json; a checkpoint folder in the format of transformers is needed")
    raw = read_json_object(path, CheckpointError, CONFIG)
    model_type, architectures = raw.get("model_type"), raw.get("architectures")
    if not isinstance(model_type, str):
        raise CheckpointError(f"{path}: model_type={model_type!r:.80}: must be the name of a family")
    if architectures is not None and not (
        isinstance(architectures, list) and all(isinstance(name, str) for name in architectures)
    ):
        raise CheckpointError(f"{path}: architectures={architectures!r:.80}: must be a list of names")
    named = [getattr(transformers, name, None) for name in architectures or () if "auto_map" in raw]
    kinds = [kind for model in named if (kind := getattr(model, "config_class", None))]
    by_name = kinds[0].model_type if kinds else ""
    family = model_type if model_type in CONFIG_MAPPING else by_name
    if family not in CONFIG_MAPPING:
        code = "; it is code that comes with the checkpoint (auto_map), which is not run" if "auto_map" in raw else ""
        raise UnsupportedModelError(
            f"{path}: model_type={model_type!r:.80}: not a family of transformers {transformers.__version__}{code}; "
            f"{_SUPPORTED}"
        )
    config_class, fields = CONFIG_MAPPING[family], of_the_model(raw) | {"model_type": family}
    if family != model_type:
        said = "%s: model_type=%.80r: runs as %s, by its architecture's name"
        logging.getLogger("expertly").warning(said, path, model_type, family)
    if not fields.get("quantization_config"):
        fields.pop("quantization_config", None)
    for name in fields:
        member = inspect.getattr_static(config_class, name, None)
        if inspect.isroutine(member) or isinstance(member, classmethod) or getattr(member, "fset", True) is None:
            raise CheckpointError(f"{path}: {name}={fields[name]!r:.80}: not a field of a config")
    try:
        with quiet():
            config = config_class.from_dict(fields)
    except Exception as cause:  # transformers and the hub's validators raise whatever they meet
        raise CheckpointError(f"{path}: transformers makes no config of it: {first_line(cause)}") from cause
    if _NO_TEXT_UPSTREAM.intersection(architectures or ()):
        config = config.get_text_config(decoder=True)
        config.architectures = None
    config.name_or_path = os.fspath(folder)
    _check_text(path, config)
    return config


def of_the_model(value: Any) -> Any:
    """A config's fields, and those in it, without `_OF_A_RUN`; with infinity for the object that stands for it."""
    if isinstance(value, list):
        return [of_the_model(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"__float__"}:
        return float("inf") if value["__float__"] == "Infinity" else value
    return {
        key: inner if key in CONFIG.long else of_the_model(inner)
        for key, inner in value.items()
        if not _OF_A_RUN.fullmatch(key)
    }


def _check_text(path: Path, config: PreTrainedConfig) -> None:
    """Refuse what transformers would find only when it writes a text, or never."""
    try:
        text = config.get_text_config(decoder=True)
    except Exception as cause:  # whatever is in its place
        raise CheckpointError(f"{path}: transformers finds no text model in it: {first_line(cause)}") from cause
    vocabulary, padding = getattr(text, "vocab_size", None), getattr(text, "pad_token_id", None)
    if type(padding) is int and type(vocabulary) is int and not -vocabulary <= padding < vocabulary:
        raise CheckpointError(f"{path}: pad_token_id={padding}: must be below vocab_size={vocabulary}")
    window, kinds = getattr(text, "sliding_window", None), getattr(text, "layer_types", None)
    slides = window is not None if kinds is None else "sliding_attention" in kinds
    if slides and (window is None or (type(window) is int and window <= 0)):
        raise CheckpointError(f"{path}: sliding_window={window}: must be above 0{', or null' if kinds is None else ''}")
    if config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{path}: is_encoder_decoder={config.is_encoder_decoder!r:.80}: models of an encoder and a decoder are not "
            f"supported; {_SUPPORTED}"
        )


def first_line(cause: BaseException) -> str:
    """Why a library refuses something: the first line of its message, cut, or the error's name."""
    lines = str(cause).strip().splitlines()
    said = lines[0].strip() if lines else ""
    if lines[1:] and said.endswith(":"):  # the validators of transformers say more in the second
        said += " " + lines[1].strip()
    return said[:300] or type(cause).__name__


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' log: what is wrong raises an exception, or is intended here."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def model_class_of(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class that `config.architectures` names, or the family's language model. Raises UnsupportedModelError."""
    for architecture in config.architectures or ():
        named = getattr(transformers, architecture, None)
        if not isinstance(named, type) or not issubclass(named, PreTrainedModel) or not named.can_generate():
            continue
        if isinstance(config, named.config_class or ()):  # else it is another family's
            return named
    if type(config) in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING:
        language_model: Any = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        return language_model[0] if isinstance(language_model, tuple) else language_model
    names = ", ".join(config.architectures or ())[:80] or "none"
    raise _unsupported(config.model_type, f"transformers has no generating model for it (architectures: {names})")


def _unsupported(model_type: str, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"model_type={model_type!r}: {reason}; {_SUPPORTED}")


_MAX_ARANGE = 1 << 24
"""Positions of the longest text are a tenth."""

_DRAWS = torch.Tensor.normal_, torch.Tensor.uniform_


class Unvalued(TorchFunctionMode):
    """A mode in which a model is made on the meta device without torch's Python implementations of meta operations,
    whose import takes 35 MiB: weights are not initialised, `arange` and tensors of lists are on the CPU, unless joined
    to others.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == nn.init.__name__ or func in _DRAWS:
            weight = args[0] if args else kwargs["tensor"]
            if weight.is_meta:
                return weight
        if func is torch.arange:
            rows = max((n for n in (*args, *kwargs.values()) if isinstance(n, int | float)), default=0)
            if rows > _MAX_ARANGE:
                raise ValueError(f"a table of {rows} rows; accepted: {_MAX_ARANGE}")
        is_list = func is torch.tensor and isinstance(args[0], list) and args[0]  # by an empty one devices are asked
        if (func is torch.arange or is_list) and kwargs.get("device") is None:
            kwargs = {**kwargs, "device": "cpu"}
        if func is torch.cat and any(part.is_meta for part in args[0]):
            args = [part.to("meta") for part in args[0]], *args[1:]
        return func(*args, **kwargs)


def _computed_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """The persistent buffers of whole numbers that a constructor computed from the config under `Unvalued`. Those that
    it leaves to the checkpoint are on the meta device.
    """
    persistent, dtypes = model.state_dict(), (torch.int32, torch.int64)
    buffers = ((name, buffer) for name, buffer in model.named_buffers() if name in persistent)
    return {name: buffer.clone() for name, buffer in buffers if buffer.is_cpu and buffer.dtype in dtypes}


def build_meta_model(
    source: str | os.PathLike[str] | PreTrainedConfig, dtype: torch.dtype | None = None
) -> PreTrainedModel:
    """The model of a checkpoint folder or config on the meta device: names, shapes and dtypes, no values. `dtype`: of
    its parameters. Its `_expertly_computed` has the values of `_computed_buffers`.

    Raises CheckpointError for a config that makes no model, UnsupportedModelError for a family that does not run.
    """
    config = source if isinstance(source, PreTrainedConfig) else read_config(source)
    model_class = model_class_of(config)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        with torch.device("meta"), Unvalued():
            model = model_class(config).eval()
        computed = _computed_buffers(model)
        model = model.to("meta")  # what was computed on the CPU
        model._expertly_computed = computed
        return model
    except Exception as cause:  # a family's own code raises whatever a number of the config leads to
        members = vars(sys.modules[model_class.__module__])
        if not any(hasattr(member, "_apply_gate") for member in members.values()):
            raise _no_experts_error(config.model_type, members) from cause
        raise CheckpointError(
            f"{_named(config)}: {model_class.__name__} cannot be built from it: {first_line(cause)}"
        ) from cause
    finally:
        torch.set_default_dtype(before)


def _named(config: PreTrainedConfig) -> str:
    folder = config.name_or_path
    return os.path.join(folder, "config.json") if folder else f"model_type={config.model_type!r}"


def find_experts(meta_model: PreTrainedModel, itemsize: int) -> list[ExpertsSite]:
    """Every experts module of `meta_model`, in layer order, for weights of `itemsize` bytes.

    Raises UnsupportedModelError, naming the family and what is supported, where there is none, or one computes
    something that the kernels do not.
    """
    sites, in_block = [], Counter[str]()
    for name, module in meta_model.named_modules():
        is_known = hasattr(type(module), "_apply_gate") and hasattr(module, "is_transposed")
        calls = None if is_known else try_experts(module)
        if is_known or calls is not None:
            block = re.sub(r"(\.\d+)\..*", r"\1", name)
            sites.append((in_block[block], _site(meta_model, name, module, itemsize, calls)))
            in_block[block] += 1
    # Layers may have several, as for text and for images: the first one of each layer, then the second ones.
    sites.sort(key=lambda site: site[0])
    if not sites:
        names = {type(module).__name__ for module in meta_model.modules()}
        raise _no_experts_error(meta_model.config.model_type, names)
    return [site for _, site in sites]


def _no_experts_error(model_type: str, class_names: Iterable[str]) -> UnsupportedModelError:
    if any("expert" in name.lower() or "moe" in name.lower() for name in class_names):
        return _unsupported(model_type, "its experts are not on transformers' experts interface")
    return _unsupported(model_type, "not a Mixture-of-Experts model")


def _site(model: PreTrainedModel, name: str, module: Any, itemsize: int, calls: Calls | None) -> ExpertsSite:
    model_type = model.config.model_type
    has_gate, is_transposed = getattr(module, "has_gate", True), (calls or module).is_transposed
    names = ("gate_up_proj" if has_gate else "up_proj", "down_proj")
    up, down = (getattr(module, weight, None) for weight in names)
    if up is None or down is None or up.dim() != 3 or down.dim() != 3:
        raise _unsupported(model_type, f"{name} has no fused weights {' and '.join(names)} of three dimensions")
    shapes = f"{names[0]} {tuple(up.shape)} and {names[1]} {tuple(down.shape)}"
    up, down = (up.transpose(1, 2), down.transpose(1, 2)) if is_transposed else (up, down)
    num_experts, (inner, hidden) = len(down), up.shape[1:]
    width = inner // 2 if has_gate else inner
    if down.shape != (num_experts, hidden, width) or (has_gate and inner % 2):
        reason = f"{name}: {shapes} are not those of experts whose input and output have one width"
        raise _unsupported(model_type, reason)
    top_k = _top_k(model, name, module, num_experts)
    geometry = LayerGeometry(num_experts, top_k, hidden, width, 3 if has_gate else 2, itemsize)
    is_concatenated = getattr(calls or module, "is_concatenated", True)
    return ExpertsSite(name, geometry, is_transposed, is_concatenated, has_gate, names, calls=calls)


_TOP_K_FIELDS = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts")
"""What configs call K. Blocks and routers also call it `top_k`, which in a config is one of sampling."""


def _top_k(model: PreTrainedModel, name: str, experts: nn.Module, num_experts: int) -> int:
    """K: an attribute of the block or of a module in it, else a field of the config. Raises CheckpointError."""
    text = model.config.get_text_config(decoder=True)
    for key in _TOP_K_FIELDS:
        value = getattr(text, key, None)
        if isinstance(value, int) and not 1 <= value <= num_experts:
            raise CheckpointError(f"{_named(model.config)}: {key}={value}: must be 1 to {num_experts}, its experts")
    parent = model.get_submodule(name.rpartition(".")[0])
    for owner in (parent, *parent.children(), getattr(experts, "config", None)):
        for key in _TOP_K_FIELDS if isinstance(owner, PreTrainedConfig) else ("top_k", *_TOP_K_FIELDS):
            value = getattr(owner, key, None)
            if isinstance(value, int) and 1 <= value <= num_experts:
                return value
    raise _unsupported(model.config.model_type, f"{name}: cannot tell how many experts a token chooses")


def dense_shape(model: PreTrainedModel) -> DenseShape:
    """Bytes of dense weights that a pass of one token reads: those of a layer that holds experts (`model.layers.3`), as
    the mean over these layers, and those of the rest of the language model with its head.

    A table of embeddings counts as one row unless it is also the head; other weights count once.
    """
    paths = {id(module): path for path, module in model.named_modules()}
    first_number = re.compile(r"(?:[^.]+\.)*?\d+(?=\.)|.*")  # a block's path ends with it
    blocks = [first_number.match(paths[id(module)])[0] for module in experts_modules(model)]  # type: ignore[index]
    stacks = {block.rpartition(".")[0].rpartition(".")[0] for block in blocks}  # `model`, of `model.layers.3`
    head = model.get_output_embeddings()
    head_weights = set(map(id, head.parameters())) if isinstance(head, nn.Module) else set()
    head_weights.add(id(getattr(head, "tiles", None)))
    tiles = [(path, buffer) for path, buffer in model.named_buffers() if path.endswith(".tiles")]
    in_blocks = rest = 0
    for path, parameter in (*model.named_parameters(), *tiles):
        if any(path.startswith(block + ".") for block in blocks):
            in_blocks += parameter.nbytes
        elif id(parameter) in head_weights:
            rest += parameter.nbytes
        elif any(path.startswith(f"{stack}.") or stack == "" for stack in stacks):  # not of a tower of images
            is_table = isinstance(model.get_submodule(path.rpartition(".")[0]), nn.Embedding)
            rest += parameter.nbytes // (parameter.shape[0] if is_table else 1)
    return DenseShape(in_blocks // len(blocks), rest)
