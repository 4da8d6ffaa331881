"""Loads the dense part of a packed store as an ordinary transformers model; its experts are computed by a `Runtime`.

Methods of an ordinary model that cannot work without its experts are refused with the reason, or made harmless.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.auto.tokenization_auto import tokenizer_class_from_name
from transformers.utils import is_protobuf_available, is_sentencepiece_available
from transformers.utils import logging as transformers_logging

from expertly.core.errors import CheckpointError, ConfigError, ExpertlyError, ModelUseError, StoreError
from expertly.core.untrusted import (
    TOKENIZER_CONFIG,
    TOKENIZER_PART,
    VOCABULARY,
    check_model_files,
    check_value,
    is_plain_name,
    open_file,
    read_json_object,
)
from expertly.model import generation, hooks
from expertly.model.batching import bounded_config
from expertly.model.kimi import kimi_tokenizer, names_kimi
from expertly.model.structure import Unvalued, find_experts, first_line, model_class_of, quiet, read_config
from expertly.model.tables import leave_in_store
from expertly.model.tiled import TiledLayer, put_tiles
from expertly.native.kernels import end_team
from expertly.store.packed import DENSE_NAME

if TYPE_CHECKING:
    from expertly.store.manifest import Manifest

_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
    *("vocab.json", "vocab.txt", "tiktoken.model", "tekken.json"),
)

_MAX_GROWTH = 64
"""Characters that a normaliser or a decoder may make of one: released ones write one mark for a space."""


def load_dense(
    store_folder: str | os.PathLike[str],
    manifest: Manifest,
    dtype: torch.dtype,
    device: torch.device | str,
    runtime: hooks.Runtime,
    extras: str | os.PathLike[str] | None = None,
    tables: Sequence[str] = (),
) -> Any:
    """The model of a packed store in evaluation mode, its dense weights on `device` in `dtype`, guarded.

    Its class is a subclass of the family's own, with the same name. Experts modules have no weights (biases stay) and
    call `runtime`. Nothing global changes, so other models in the process are not affected. Its generation config is
    read in `extras`, or in the store. `tables`: paths of embeddings that stay in the store, see `Tables.bind`.

    Raises StoreError where the store's experts are not those of its config, CheckpointError naming the tensors that are
    missing or have another shape.
    """
    folder = os.fspath(store_folder)
    config = read_config(folder)
    beside = os.fspath(extras or store_folder)
    vocabulary = int(getattr(config.get_text_config(decoder=True), "vocab_size", 1 << 31))
    ALL_EXPERTS_FUNCTIONS.register(hooks.IMPLEMENTATION, hooks.experts_forward)
    generating = generation.read_config(beside, Path(folder) / "config.json", vocabulary)
    draws_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # else it draws them even where there is no terminal
    try:
        model, report = _strippable(model_class_of(config), manifest, tables).from_pretrained(
            folder,
            config=config,
            generation_config=generating,
            dtype=dtype,
            experts_implementation=hooks.IMPLEMENTATION,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # `_check_report` raises our own error
            local_files_only=True,
        )
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: the dense weights cannot be read: {error}") from error
    finally:
        if draws_bars:
            transformers_logging.enable_progress_bar()
    _check_report(folder, report)
    nn.Module.to(model, torch.device(device))
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_cpu:  # else it is the file, mapped: who writes to that changes the model, who cuts it ends us
            tensor.data = tensor.data.clone()
    model.requires_grad_(False)
    model.config.name_or_path = beside
    for layer, site in enumerate(manifest.sites):
        hooks.bind(model.get_submodule(site), layer, runtime)
    hooks.attach(model, manifest.sites, runtime)
    model._expertly_runtime, model._expertly_is_sealed = runtime, True
    return model


def load_experts(store_folder: str | os.PathLike[str], manifest: Manifest, dtype: torch.dtype) -> list[nn.Module]:
    """The experts modules of a packed store in layer order, without the weights that slots hold, for a worker: it has
    no dense part. Their biases are on the CPU in `dtype`. Raises as `load_dense`.
    """
    config = read_config(store_folder)
    with torch.device("meta"):
        model = _strippable(model_class_of(config), manifest)(config)
    modules = [model.get_submodule(site) for site in manifest.sites]
    path = Path(store_folder) / DENSE_NAME
    try:
        with safe_open(path, framework="pt") as dense:
            names = set(dense.keys())
            for site, module in zip(manifest.sites, modules, strict=True):
                for name, parameter in list(module.named_parameters()):
                    if (full := f"{site}.{name}") not in names:
                        raise CheckpointError(f"{path}: no tensor for {full}")
                    owner = module.get_submodule(name.rpartition(".")[0])
                    values = dense.get_tensor(full).to(dtype, copy=True)  # and not the file, mapped
                    if values.shape != parameter.shape:
                        raise CheckpointError(f"{path}: the config asks for another shape of {full}")
                    setattr(owner, name.rpartition(".")[2], nn.Parameter(values, requires_grad=False))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: the dense weights cannot be read: {error}") from error
    return modules


def load_tokenizer(folder: str | os.PathLike[str]) -> Any:
    """The tokenizer in a model's folder, None where it has none. All files there that transformers reads are checked
    before. Raises CheckpointError where one cannot be read, or the tokenizer is code, which is not run.
    """
    folder = Path(folder)
    check_model_files(folder, CheckpointError)
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return None
    settings, vocabulary = folder / "tokenizer_config.json", folder / "tokenizer.json"
    is_kimi = settings.exists() and _check_settings(settings, has_vocabulary=vocabulary.exists())
    if vocabulary.exists():
        _check_vocabulary(vocabulary)
    pieces = None if is_kimi else _sentencepiece_alone(folder)
    config = read_config(folder) if (folder / "config.json").exists() else PreTrainedConfig()
    with tokenizer_errors(f"{folder}: the tokenizer cannot be read"), quiet(), held_stderr():
        if is_kimi:
            return kimi_tokenizer(folder)
        tokenizer = AutoTokenizer.from_pretrained(
            os.fspath(folder), config=config, local_files_only=True, trust_remote_code=False
        )
        if pieces is not None:
            _check_pieces(tokenizer, pieces)
        return tokenizer


@contextlib.contextmanager
def tokenizer_errors(doing: str, failure: type[ExpertlyError] = CheckpointError) -> Iterator[None]:
    """Turn whatever `tokenizers` and transformers raise while a tokenizer is read or used into a `failure` that begins
    with `doing`. To be put around such a call alone.

    `tokenizers` raises plain Exception, and where Rust panics a BaseException of its own, of which Rust writes some
    lines to stderr by itself.
    """
    try:
        yield
    except ExpertlyError:
        raise
    except BaseException as cause:
        if not isinstance(cause, Exception) and type(cause).__name__ != "PanicException":
            raise
        raise failure(f"{doing}: {first_line(cause)}") from cause


@contextlib.contextmanager
def held_stderr() -> Iterator[None]:
    """What is written to stderr's descriptor meanwhile is written when the block ends, and not where Rust panics: it
    writes some lines about that, and the error says it.
    """
    try:
        stderr = os.dup(2)
    except OSError:  # it is closed
        yield
        return
    is_panic = False
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        except BaseException as cause:
            is_panic = type(cause).__name__ == "PanicException"
            raise
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            held.seek(0)
            with contextlib.suppress(OSError):
                os.write(2, b"" if is_panic else held.read())


def _check_settings(path: Path, *, has_vocabulary: bool) -> bool:
    """Refuse a tokenizer that is code, unless its vocabulary also stands beside it in the form that needs none, or it
    is Kimi's, which is returned.
    """
    settings = read_json_object(path, CheckpointError, TOKENIZER_CONFIG)
    name, code = settings.get("tokenizer_class"), settings.get("auto_map")
    files = settings.get("fast_tokenizer_files", [])
    for field, is_right, accepted in (
        ("tokenizer_class", name is None or isinstance(name, str), "a name"),
        (
            "fast_tokenizer_files",
            isinstance(files, list) and all(map(is_plain_name, files)),
            "names of files beside it",
        ),
        ("auto_map", code is None or isinstance(code, dict | list), "an object"),
    ):
        if not is_right:
            raise CheckpointError(f"{path}: {field}={settings[field]!r:.80}: must be {accepted}")
    by_code = code.get("AutoTokenizer") if isinstance(code, dict) else code
    if has_vocabulary:
        return False
    if names_kimi(path.parent, by_code):
        return True
    written = "with a tokenizer.json beside it, which `save_pretrained` of the model's own tokenizer may write"
    if by_code:
        raise CheckpointError(
            f"{path}: auto_map={by_code!r:.80}: the tokenizer is code, which is not run, and others split text "
            f"differently; accepted: {written}"
        )
    if name and all(tokenizer_class_from_name(name.removesuffix("Fast") + end) is None for end in ("", "Fast")):
        raise CheckpointError(
            f"{path}: tokenizer_class={name!r:.80}: not a tokenizer of transformers {transformers.__version__}; "
            f"accepted: {written}"
        )
    return False


def _sentencepiece_alone(folder: Path) -> Path | None:
    """The vocabulary of sentencepiece that a tokenizer is to be made of; None where there is another. Raises
    CheckpointError where what reads it is not installed.
    """
    names = [name for name in _TOKENIZER_FILES if name != "tokenizer_config.json" and (folder / name).exists()]
    if not names or not names[0].endswith(".model"):
        return None
    path = folder / names[0]
    with open_file(path, CheckpointError) as file:
        if file.read(1) != b"\n":  # the mark of a list of pieces; tiktoken's files are text
            return None
    if not (is_sentencepiece_available() and is_protobuf_available()):
        raise CheckpointError(
            f"{path}: a vocabulary of sentencepiece: pip install sentencepiece protobuf; or put a tokenizer.json "
            "beside it, which `save_pretrained` of its tokenizer writes where they are installed"
        )
    return path


def _check_pieces(tokenizer: Any, path: Path) -> None:
    """Refuse a tokenizer that splits a text unlike sentencepiece itself: transformers may take the class of another."""
    text = "the quick brown fox"
    processor = importlib.import_module("sentencepiece").SentencePieceProcessor(os.fspath(path))
    if processor.encode(text, out_type=str) != tokenizer.tokenize(text):
        raise CheckpointError(
            f"{path}: {type(tokenizer).__name__} splits text otherwise than sentencepiece; accepted: the right "
            "tokenizer_class in tokenizer_config.json, or a tokenizer.json"
        )


def _check_vocabulary(path: Path) -> None:
    """Refuse a `tokenizer.json` that is long where vocabularies are not, or makes long texts of short ones."""
    tokenizer = read_json_object(path, CheckpointError, VOCABULARY)
    for name, part in tokenizer.items():
        if name in ("model", "added_tokens"):
            continue
        growth = 1
        for step in _steps(part):
            step.pop("precompiled_charsmap", None)
            written = (step.get(key) for key in ("content", "prepend"))
            growth *= max([1, *(len(text) for text in written if isinstance(text, str))])
        check_value(part, f"{path}: {name}", TOKENIZER_PART, CheckpointError)
        if growth > _MAX_GROWTH and name in ("normalizer", "decoder"):
            raise CheckpointError(f"{path}: {name}: makes {growth} characters of one; accepted: {_MAX_GROWTH}")


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    if isinstance(part, dict):
        yield part
    for inner in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        yield from _steps(inner)


def _strippable(original: type[PreTrainedModel], manifest: Manifest, tables: Sequence[str] = ()) -> Any:
    """A subclass under `original`'s name that is guarded and drops its experts' weights as soon as it is built."""

    @functools.wraps(original.__init__)
    def __init__(self: Any, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        try:
            with Unvalued():
                original.__init__(self, config, *args, **kwargs)
        except Exception as cause:  # a family's own code raises whatever a number of the config leads to
            made = f"{original.__name__} cannot be built from its config.json"
            raise CheckpointError(f"{config.name_or_path}: {made}: {first_line(cause)}") from cause
        _strip(self, manifest, tables)

    ignored = [".*"]  # a store also has the checkpoint's tensors that are not of the model
    return hooks.look_alike(original, GuardedModel, __init__=__init__, _keys_to_ignore_on_load_unexpected=ignored)


def _strip(model: PreTrainedModel, manifest: Manifest, tables: Sequence[str]) -> None:
    """Drop the experts' weights of a model on the meta device, so that loading neither expects nor initialises them."""
    sites = find_experts(model, manifest.layers[0].itemsize)
    if tuple(site.name for site in sites) != tuple(manifest.sites):
        raise StoreError(f"{manifest.source}: its store has other MoE layers than its config makes; pack it again")
    for site, packed in zip(sites, manifest.layers, strict=True):
        if site.geometry != packed.unquantised():
            raise StoreError(f"{site.name}: the store holds {packed}, its config makes {site.geometry}; pack it again")
        # transformers' initialisers access these weights by name: in the module itself, or in its parent.
        hooks.strip(model, site)._is_hf_initialized = True
        parent: Any = model.get_submodule(site.name.rpartition(".")[0])
        parent._is_hf_initialized = True
    leave_in_store(model, tables)
    try:
        put_tiles(model, {path: form for path, form in manifest.dense_formats.items() if path not in tables})
    except ConfigError as error:
        raise StoreError(f"{manifest.source}: its store has another dense part: {error}; pack it again") from None


def _check_report(folder: str, report: Mapping[str, Any]) -> None:
    mismatched = (entry[0] if isinstance(entry, tuple) else entry for entry in report["mismatched_keys"])
    conversions = (f"{name}: {error}" for name, error in report.get("conversion_errors", {}).items())
    for problem, names in (
        ("no tensor for ", sorted(report.get("missing_keys", ()))),
        ("the config asks for another shape of ", sorted(map(str, mismatched))),
        ("", [*report.get("error_msgs", ()), *conversions]),
    ):
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise CheckpointError(f"{folder}: {problem}{', '.join(names[:5])}{more}")


# -- what such a model cannot do ---------------------------------------------------------------------------------------

_ELSEWHERE = "this model's experts are not in it, they come and go behind it"
_LOAD_AGAIN = "; load the model again with the device and dtype you want"


def _refusing(attempt: str, reason: str) -> Any:
    """A method that says why it cannot work."""

    def method(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise ModelUseError(f"{attempt}: {_ELSEWHERE}{reason}")

    return method


class GuardedModel:
    _expertly_is_sealed = False  # only a loaded model refuses to be moved and cast
    _expertly_runtime: hooks.Runtime
    _expertly_tokenizer: Any = None

    # -- what it computes ------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raises NanError where the head gives NaN."""
        output = super().__call__(*args, **kwargs)  # type: ignore[misc]
        if isinstance(logits := getattr(output, "logits", None), torch.Tensor):
            self._expertly_runtime.check_logits(logits)
        return output

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """transformers' method. The next call may come from another thread."""
        try:
            return super().generate(*args, **kwargs)  # type: ignore[misc]
        finally:
            end_team()

    def _get_stopping_criteria(self, *args: Any, **kwargs: Any) -> Any:
        """When `generate` stops. Stop strings need a tokenizer, which who calls it need not give."""
        kwargs["tokenizer"] = kwargs.get("tokenizer") or self._expertly_tokenizer
        return super()._get_stopping_criteria(*args, **kwargs)  # type: ignore[misc]

    # -- what needs all weights in it, where they are and as they are ----------------------------------------

    save_pretrained = _refusing("save_pretrained", ": it would write a model without them; copy the checkpoint")
    push_to_hub = _refusing("push_to_hub", ": it would upload a model without them")
    __reduce_ex__ = _refusing("copying and pickling", " (files, threads, slots): load it again where it is needed")
    share_memory = _refusing("share_memory", _LOAD_AGAIN)
    compile = _refusing("compile", ", which cannot be traced; call the model as it is")

    def _apply(self: Any, fn: Any, recurse: bool = True) -> Any:
        """Called by `to`, `half`, `cuda` and similar methods. Returns `self` where nothing would change."""
        if not self._expertly_is_sealed:
            return super()._apply(fn, recurse)  # type: ignore[misc]
        weight = torch.empty(1, 2, 2, 2, dtype=self.dtype, device=self.device)
        wanted = "elsewhere"
        on_it = torch.accelerator.device_index(self.device.index)  # so that "cuda" means the model's own device
        with contextlib.suppress(RuntimeError, AssertionError), on_it:  # the device does not exist
            made = fn(weight)
            if made is weight:
                return self
            wanted = f"{made.dtype} on {made.device}"
        attempt = f"moving or casting it ({wanted}; it is {self.dtype} on {self.device})"
        raise ModelUseError(f"{attempt}: {_ELSEWHERE}{_LOAD_AGAIN}")

    def resize_token_embeddings(
        self: Any, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        table = self.get_input_embeddings()
        if isinstance(table, TiledLayer) and {new_num_tokens, pad_to_multiple_of} - {None, table.num_embeddings}:
            raise table.refusal("resize_token_embeddings")
        return super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, *args, **kwargs)  # type: ignore[misc]

    def get_expanded_tied_weights_keys(self: Any, *args: Any, **kwargs: Any) -> dict[str, str]:
        """Layers that share tiles stay so: `tie_weights` has nothing to do for them."""
        tied = super().get_expanded_tied_weights_keys(*args, **kwargs)  # type: ignore[misc]
        shared = {
            name for name, of in tied.items() if isinstance(self.get_submodule(of.rpartition(".")[0]), TiledLayer)
        }
        return {name: of for name, of in tied.items() if name not in shared}

    def set_experts_implementation(self: Any, experts_implementation: str | dict[str, str]) -> None:
        wanted = experts_implementation
        values = set(wanted.values()) if isinstance(wanted, dict) else {wanted}
        if self._expertly_is_sealed and not values <= {hooks.IMPLEMENTATION, self.config._experts_implementation}:
            raise ModelUseError(
                f"set_experts_implementation({wanted!r}): {_ELSEWHERE}; accepted: {hooks.IMPLEMENTATION!r}"
            )

    def _valid_auto_compile_criteria(self, *args: Any, **kwargs: Any) -> bool:
        return False  # else generate() compiles for a static cache, which works without

    def init_continuous_batching(
        self: Any, generation_config: Any = None, continuous_batching_config: Any = None, **kwargs: Any
    ) -> Any:
        """transformers' method; see `bounded_config`."""
        config = bounded_config(continuous_batching_config, generation_config or self.generation_config)
        return super().init_continuous_batching(  # type: ignore[misc]
            generation_config=generation_config, continuous_batching_config=config, **kwargs
        )
