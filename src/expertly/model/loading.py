"""Loads the dense part of a packed store as an ordinary transformers model whose experts are somewhere else."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from expertly.core.errors import CheckpointError, StoreError
from expertly.model import context, experts, switch
from expertly.model.adapter import ExpertsSite, check_family, find_experts, model_class_of, read_config
from expertly.model.guards import GuardedModel
from expertly.model.runtime import Runtime

if TYPE_CHECKING:
    from expertly.store.manifest import Manifest

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
)


def load_dense(
    store_folder: str | os.PathLike[str],
    manifest: Manifest,
    dtype: torch.dtype,
    device: torch.device | str,
    runtime: Runtime,
) -> Any:
    """The model of a packed store in evaluation mode, its dense weights on `device` in `dtype`, guarded.

    Its class is a subclass of the family's own, under the same name. Experts modules have no weights (biases stay)
    and call `runtime`; nothing global changes, so other models in the process are not affected.
    Raises StoreError where the store's experts are not those that its config makes, CheckpointError naming the
    tensors where one is missing or has another shape.
    """
    folder = os.fspath(store_folder)
    config = read_config(folder)
    check_family(config)
    experts.register()
    model_class = _strippable(model_class_of(config), manifest)
    try:
        with _no_progress_bars():
            model, report = model_class.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                experts_implementation=experts.IMPLEMENTATION,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # reported below, in our words
                local_files_only=True,
            )
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: the dense weights cannot be read: {error}") from error
    _check_report(folder, report)
    nn.Module.to(model, torch.device(device))
    model.requires_grad_(False)
    model.config.name_or_path = manifest.source
    for layer, module in enumerate(_by_name(model, manifest.sites)):
        experts.bind(module, layer, runtime)
    context.attach(model, runtime)
    model.seal()
    return model


def experts_modules(model: nn.Module) -> list[nn.Module]:
    """The experts modules of a loaded model, in layer order."""
    found = [module for module in model.modules() if hasattr(module, "_expertly_layer")]
    return sorted(found, key=lambda module: module._expertly_layer)  # type: ignore[arg-type, return-value]


def load_tokenizer(folder: str | os.PathLike[str]) -> Any:
    """The tokenizer in a store, None where it has none. Raises CheckpointError where it cannot be read."""
    if not any((Path(folder) / name).is_file() for name in _TOKENIZER_FILES):
        return None
    try:
        return AutoTokenizer.from_pretrained(os.fspath(folder), local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        raise CheckpointError(f"{folder}: the tokenizer cannot be read: {error}") from error


@contextlib.contextmanager
def _no_progress_bars() -> Iterator[None]:
    """transformers draws them on anything, a terminal or not."""
    was_enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            transformers_logging.enable_progress_bar()


def _strippable(original: type[PreTrainedModel], manifest: Manifest) -> Any:
    """A subclass that looks like `original`, is guarded, and drops its experts' weights as soon as it is built."""

    @functools.wraps(original.__init__)
    def __init__(self: Any, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        original.__init__(self, config, *args, **kwargs)
        _strip(self, manifest)

    namespace = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "__init__": __init__,
        "_keys_to_ignore_on_load_unexpected": [".*"],  # a store holds what its source held beside the model, too
    }
    return type(original.__name__, (GuardedModel, original), namespace)


def _strip(model: PreTrainedModel, manifest: Manifest) -> None:
    """Drop the experts' weights of a model on the meta device, so that they are neither looked for nor initialised."""
    sites = find_experts(model, manifest.layers[0].itemsize)
    if tuple(site.name for site in sites) != tuple(manifest.sites):
        raise StoreError(f"{manifest.source}: its store has other MoE layers than its config makes; pack it again")
    for site, packed in zip(sites, manifest.layers, strict=True):
        if site.geometry != packed:
            raise StoreError(f"{site.name}: the store holds {packed}, its config makes {site.geometry}; pack it again")
        module: Any = model.get_submodule(site.name)
        _drop_weights(module, site)
        # Initialisers look at weights by name: of the experts here, of switch's experts in their parent.
        module._is_hf_initialized = True
        if not site.is_fused:
            parent: Any = model.get_submodule(site.name.rpartition(".")[0])
            parent._is_hf_initialized = True


def _drop_weights(module: nn.Module, site: ExpertsSite) -> None:
    if not site.is_fused:
        switch.strip(module)
        return
    for name in site.weight_names:
        delattr(module, name)


def _by_name(model: nn.Module, sites: tuple[str, ...]) -> list[nn.Module]:
    return [model.get_submodule(name) for name in sites]


def _check_report(folder: str, report: Mapping[str, Any]) -> None:
    missing = sorted(report.get("missing_keys", ()))
    if missing:
        raise CheckpointError(f"{folder}: no tensor for {_first(missing)}")
    mismatched = sorted(
        str(entry[0]) if isinstance(entry, tuple) else str(entry) for entry in report["mismatched_keys"]
    )
    if mismatched:
        raise CheckpointError(f"{folder}: the config asks for another shape of {_first(mismatched)}")
    errors = [*report.get("error_msgs", ()), *(f"{k}: {v}" for k, v in report.get("conversion_errors", {}).items())]
    if errors:
        raise CheckpointError(f"{folder}: {_first(errors)}")


def _first(names: list[str], limit: int = 5) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
