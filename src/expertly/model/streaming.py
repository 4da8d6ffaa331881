"""Packs a model of the hub shard by shard and deletes each packed shard, so that the disk holds one
model and a shard.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from expertly.core.costs import CODECS, check_codec
from expertly.core.errors import ConfigError, DownloadError, StoreError
from expertly.core.headers import TensorSpec
from expertly.model.hub import HubModel, arrived
from expertly.model.packing import Packing, check_codec_of, local_folder, open_store, weights_of
from expertly.store.cache import check_space, entry_folder, make_room_for_this_version, store_errors
from expertly.store.checkpoint import Checkpoint
from expertly.store.packed import DENSE_NAME, PackedStore, is_packed_store
from expertly.store.removal import begin_download, remove_in_place
from expertly.store.writer import Progress, StoreWriter, begun_codec, partial_folder


@dataclass(frozen=True, slots=True)
class _Unit:
    """A unit of packing: a layer's experts, or (`layer` None) the dense tensors that come from the same files."""

    files: frozenset[str]
    layer: int | None
    number: int = 0  # of the dense part
    specs: tuple[TensorSpec, ...] = ()


def pack_streamed(
    name: str,
    folder: Path | None = None,
    dtype: str | None = None,
    codec: str = "auto",
    progress: Progress | None = None,
    cache_dir: Path | None = None,
) -> PackedStore:
    """The packed store of the hub's model `name`, at `folder` or in the cache folder, where loading `name` finds it.

    Files in the hub's own cache are read there and stay. Continues where an interrupted packing of the same weights
    ended. `codec` "auto" is the codec of an existing or unfinished store, else "none": measuring would need weights.
    Raises CheckpointError for the model, StoreError for the disk; if it is too small, before large files are
    downloaded.
    """
    check_codec(codec)
    if local_folder(name) is not None:
        raise ConfigError(f"model={name!r}: is here already; accepted with stream: a hub id")
    hub = HubModel.find(name)
    beside = folder or entry_folder("hub", hub.commit, "shards", cache_dir)
    here = beside.with_name(f"{beside.name}.download")
    with store_errors(here, "making the folder"):
        begin_download(here, hub.files)
    hub.fetch_small_files(here)
    checkpoint = hub.checkpoint(here)
    weights = weights_of(checkpoint, dtype)
    identity = hub.identity((here / "config.json").read_bytes())
    model_type = str(checkpoint.config.get("model_type"))
    folders = {one: folder or entry_folder(model_type, identity, weights.label, cache_dir, one) for one in CODECS}
    for one in () if folder else folders.values():
        make_room_for_this_version(one)
    check_codec_of(weights, codec)
    if codec == "auto":
        there = [one for one, path in folders.items() if is_packed_store(path)]
        begun = [one for one in map(begun_codec, folders.values()) if one is not None]
        codec = [*there, *begun, "none"][0]
    target = folders[codec]
    try:
        if not is_packed_store(target):
            _Stream(hub, checkpoint, Packing(checkpoint, weights), here).write(target, codec, identity, progress)
        store = open_store(target, None if weights.format else weights.dtype, codec, identity)
    except (StoreError, DownloadError):
        raise
    except Exception:  # it would fail again
        _remove(here)
        raise
    _remove(here)
    return replace(store, why_codec="it was asked for, or begun in it, or weights that are streamed are not measured")


def _remove(here: Path) -> None:
    with contextlib.suppress(OSError):
        remove_in_place(here)


class _Stream:
    """One model on its way from the hub into a store."""

    def __init__(self, hub: HubModel, checkpoint: Checkpoint, packing: Packing, here: Path) -> None:
        self._hub = hub
        self._checkpoint = checkpoint
        self._packing = packing
        self._here = here
        self._units = self._plan_units()
        self._place = {
            spec: (unit.number, sum(before.nbytes for before in unit.specs[:index]))
            for unit in self._units
            for index, spec in enumerate(unit.specs)
        }

    def _plan_units(self) -> list[_Unit]:
        """The units in the order in which they can be packed when files arrive by name."""
        packing = self._packing
        units = [_Unit(packing.files_of_layer(layer), layer) for layer in range(len(packing.layers))]
        by_files: dict[frozenset[str], list[TensorSpec]] = {}
        for spec in packing.dense:
            by_files.setdefault(packing.files_of_dense(spec), []).append(spec)
        units += [_Unit(files, None, number, tuple(specs)) for number, (files, specs) in enumerate(by_files.items())]
        return sorted(units, key=lambda unit: max(unit.files))

    def write(self, folder: Path, codec: str, identity: str, progress: Progress | None) -> None:
        packing = self._packing
        plan = packing.plan(codec, identity, f"{self._hub.name}@{self._hub.commit}")
        self._check_space(folder)
        with StoreWriter(folder, plan, packing.dense, progress) as writer:
            if writer.finished_store() is not None:
                return
            left = [unit for unit in self._units if not self._is_done(writer, unit)]
            for unit in list(left):
                for name in sorted(unit.files):
                    self._hub.fetch(name, self._here)
                    arrived(self._checkpoint, self._here / name)
                if unit.layer is not None:
                    writer.write_layer(unit.layer, packing.experts(unit.layer))
                else:
                    chunks = (chunk for spec in unit.specs for chunk in packing.dense_chunks(spec))
                    writer.write_dense_part(unit.number, chunks)
                left.remove(unit)
                self._delete_unneeded(left)
            if not writer.is_done(DENSE_NAME):
                writer.write_dense(lambda spec: writer.dense_part(*self._place[spec], spec.nbytes))
            writer.drop_dense_parts()
            writer.write_file("config.json", packing.config_bytes())
            writer.copy_extras(self._here)
            writer.finish()

    def _is_done(self, writer: StoreWriter, unit: _Unit) -> bool:
        return writer.is_part_done(unit.number) if unit.layer is None else writer.is_layer_done(unit.layer)

    def _delete_unneeded(self, left: Sequence[_Unit]) -> None:
        """Delete shards whose tensors are all packed. Of a file in the hub's cache only the link is deleted."""
        needed = frozenset().union(*(unit.files for unit in left))
        for name in self._hub.weights:
            if name not in needed:
                (self._here / name).unlink(missing_ok=True)

    def _check_space(self, folder: Path) -> None:
        """Raise StoreError, before a shard is downloaded, without room for the store and the shards beside it."""
        packing, files = self._packing, self._hub.files
        left, held, most = list(self._units), set[str](), 0
        for unit in self._units:
            held |= unit.files
            most = max(most, sum(files[name] for name in held))
            left.remove(unit)
            held &= frozenset().union(*(one.files for one in left))
        store_nbytes = sum(layer.nbytes for layer in packing.layers) + 2 * packing.dense_nbytes
        partial, there = partial_folder(folder), 0
        for where in (partial, self._here):
            there += sum(path.lstat().st_size for path in where.glob("*") if path.is_file()) if where.is_dir() else 0
        check_space(folder, store_nbytes + most - there, f", of which {most} for shards while they are packed")
