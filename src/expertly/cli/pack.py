"""`expertly pack`: write a model as a packed store; list, verify and remove stores."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from expertly.cli.output import Column, figures_table, message, print_json, progress_bar, reserved_stdout, show
from expertly.core.errors import ConfigError
from expertly.core.units import format_nbytes, format_seconds
from expertly.formats import rounding_format
from expertly.options import argument, json_flag, load_option, option, path_option
from expertly.store import cache
from expertly.store.manifest import check_store_dtype
from expertly.store.packed import PackedStore

LISTED: dict[str, Column] = {
    "store": ("name", str),
    "size": ("bytes", format_nbytes),
    "dtype": ("dtype", str),
    "packed from": ("from", str),
}


@dataclass(frozen=True, kw_only=True)
class PackOptions:
    model: str | None = argument(
        None, "a checkpoint folder, a GGUF file, a hub id, or demo for the demo model", metavar="MODEL"
    )
    out: Path | None = path_option(None, "write the store here", "DIR")
    dtype: str | None = load_option("dtype", panel=None)
    quantize: str | None = load_option("quantize", panel=None)
    list: bool = option(False, "show the stores in the cache folder")
    remove: str | None = option(None, "remove a store from the cache folder", metavar="NAME")
    verify: Path | None = path_option(
        None, "read a whole store, in a folder or of that name in the cache, and compare its checksums", "DIR"
    )
    json: bool = json_flag()


def run(args: PackOptions) -> int:
    asked = [name for name in ("list", "remove", "verify") if getattr(args, name) not in (None, False)]
    if not asked:
        return _pack(args)
    if len(asked) > 1:
        raise ConfigError(f"--{asked[0]} and --{asked[1]}: accepted: one of the two")
    for name in ("model", "out", "dtype", "quantize"):
        if (value := getattr(args, name)) is not None:
            raise ConfigError(f"{name}={str(value)!r}: not accepted with --{asked[0]}")
    return {"list": _list, "remove": _remove, "verify": _verify}[asked[0]](args)


def _pack(args: PackOptions) -> int:
    if args.model is None:
        accepted = "MODEL (demo for the demo model), --list, --remove, --verify"
        raise ConfigError(f"model: nothing to pack; accepted: {accepted}")
    if args.dtype is not None:
        check_store_dtype(args.dtype)
    if args.quantize is not None:
        rounding_format(args.quantize)
    start = time.monotonic()
    with reserved_stdout() as stdout:
        from expertly.engine.fitting import with_quantisation
        from expertly.model.packing import pack, pack_cached, source_folder

        model = with_quantisation(args.model)
        with progress_bar() as bar:
            progress = partial(bar, "packing")
            if args.out is None:
                store = pack_cached(model, args.dtype, progress=progress, quantize=args.quantize)
            else:
                source = source_folder(model, args.out if args.dtype is args.quantize is None else None)
                store = pack(source, args.out, args.dtype, progress, args.quantize)
    seconds = time.monotonic() - start
    facts = {**_facts(store), "seconds": seconds}
    show(facts, args.json, lambda: str(store.folder), stdout)
    if not args.json:
        message(f"expertly: {_summary(store)}, {format_seconds(seconds)}")
        if store.manifest.rounding is not None:
            message(f"expertly: experts are {store.manifest.rounding}")
    return 0


def _list(args: PackOptions) -> int:
    stores = [_entry_facts(entry) for entry in cache.list_entries()]
    if not stores and not args.json:
        message(f"expertly: no store in {cache.stores_folder()}")
        return 0
    rows = []
    for store in stores:
        dtype = f"{store['dtype']}, rounded" if store["rounded"] else store["dtype"] or None
        rows.append(store | {"dtype": dtype, "from": store["problem"] or store["source"]})
    show({"folder": str(cache.stores_folder()), "stores": stores}, args.json, lambda: figures_table(rows, LISTED))
    return 0


def _remove(args: PackOptions) -> int:
    entry = cache.remove_entry(str(args.remove))
    return _done(args, {"removed": _entry_facts(entry)}, f"removed {entry.name}, {format_nbytes(entry.nbytes)}")


def _verify(args: PackOptions) -> int:
    folder = Path(str(args.verify))
    store = PackedStore.open(folder if folder.exists() else cache.stores_folder() / folder)
    with progress_bar() as bar:
        store.verify(progress=partial(bar, "verifying"))
    return _done(args, {**_facts(store), "verified": True}, f"{store.folder} is whole: {_summary(store)}")


def _done(args: PackOptions, facts: dict[str, Any], sentence: str) -> int:
    if args.json:
        print_json(facts)
    else:
        message(f"expertly: {sentence}")
    return 0


def _summary(store: PackedStore) -> str:
    manifest = store.manifest
    num_experts = sum(layer.num_experts for layer in manifest.layers)
    experts = f"{format_nbytes(store.experts_nbytes)} in {manifest.stored_as}"
    if any(layer.format for layer in manifest.layers):
        whole = sum(layer.unquantised().nbytes for layer in manifest.layers)
        how = "as the checkpoint has them" if manifest.rounding is None else "rounded from the checkpoint's"
        experts += f" {how} ({format_nbytes(whole)} in {manifest.dtype})"
    if manifest.dense_formats:
        formats = ", ".join(dict.fromkeys(manifest.dense_formats.values()))
        whole = sum(store.dense_by_format(is_decoded=True).values())
        rest = f"the rest {format_nbytes(store.dense_nbytes)} with layers in {formats}"
        experts += f"; {rest} ({format_nbytes(whole)} in {manifest.dtype})"
    return f"{manifest.model_type}, {num_experts} experts in {len(manifest.layers)} layers, {experts}"


def _facts(store: PackedStore) -> dict[str, Any]:
    manifest = store.manifest
    return {
        "store": str(store.folder),
        **{name: getattr(manifest, name) for name in ("source", "identity", "model_type")},
        "dtype": manifest.stored_as,
        "rounding": None if manifest.rounding is None else {"to": manifest.rounding.to},
        "layers": len(manifest.layers),
        "experts": sum(layer.num_experts for layer in manifest.layers),
        "expert_bytes": store.experts_nbytes,
        "dense_bytes": store.dense_nbytes,
        "dense_formats": store.dense_by_format(),
        "store_bytes": store.nbytes,
    }


def _entry_facts(entry: cache.CacheEntry) -> dict[str, Any]:
    facts = {name: getattr(entry, name) for name in ("name", "source", "model_type", "dtype", "problem")}
    return {**facts, "folder": str(entry.folder), "bytes": entry.nbytes, "rounded": entry.is_rounded}
