"""A model on the hub: its tensors without their values, and its files, one at a time or all of them."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from expertly.core.errors import CheckpointError, DownloadError
from expertly.core.files import existing_parent
from expertly.core.headers import read_safetensors_header, tensor_info
from expertly.core.untrusted import is_plain_name, read_json_object
from expertly.store.cache import check_space, store_errors
from expertly.store.checkpoint import INDEX_NAME, SINGLE_NAME, Checkpoint, TensorRef, check_claims

_WANTED = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "LICENSE*", "NOTICE*")
_UNKNOWN_OFFSET = -1


def download(name: str, store_nbytes: Callable[[HubModel], int] = lambda hub: 0, store: Path | None = None) -> Path:
    """The folder of the hub's model `name`, downloaded or from the hub's own cache. Raises CheckpointError with the
    reason; if the disk is too small, before anything is downloaded: for that, and for a store at `store`.
    """
    from huggingface_hub import snapshot_download

    _check_room(name, store_nbytes, store)
    with hub_errors(name):
        return Path(snapshot_download(name, allow_patterns=list(_WANTED), ignore_patterns=["*/*"]))


def _check_room(name: str, store_nbytes: Callable[[HubModel], int], store: Path | None) -> None:
    """Compare what is to be downloaded and packed with the free space. If the hub does not answer, its cache may have
    all.
    """
    from huggingface_hub import constants, try_to_load_from_cache

    try:
        hub = HubModel.find(name)
    except CheckpointError:
        return
    lacking = [one for one in hub.files if not isinstance(try_to_load_from_cache(name, one, revision=hub.commit), str)]
    if not lacking:
        return  # who packs it looks
    needed, packed = sum(hub.files[one] for one in lacking), store_nbytes(hub)
    folder = existing_parent(Path(constants.HF_HUB_CACHE))
    free = shutil.disk_usage(folder).free
    beside = existing_parent(store or folder)
    is_one_disk = beside.stat().st_dev == folder.stat().st_dev
    if needed + (packed if is_one_disk else 0) > free:
        then = f", {packed} more are packed from them" if packed and is_one_disk else ""
        raise CheckpointError(
            f"model={name!r}: {needed} bytes are to be downloaded{then}, and {free} are free in {folder}; make room, "
            "set HF_HOME or EXPERTLY_CACHE to another disk, or pack it shard by shard (expertly pack --stream)"
        )
    if not is_one_disk:
        check_space(beside, packed, f" for the store of {name}")


@contextlib.contextmanager
def hub_errors(name: str) -> Iterator[None]:
    """Turn exceptions of the hub's client into a DownloadError with the reason."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        NotASafetensorsRepoError,
        OfflineModeIsEnabled,
        SafetensorsParsingError,
    )

    try:
        yield
        return
    except HFValidationError:
        reason = "not a hub id either (name or owner/name; a prompt stands behind the model)"
    except GatedRepoError:
        reason = "the hub has it, but wants you to accept its terms and log in (hf auth login)"
    except (LocalEntryNotFoundError, OfflineModeIsEnabled):
        reason = "the hub cannot be reached, and its cache here does not have it"
    except (NotASafetensorsRepoError, SafetensorsParsingError) as error:
        reason = f"what the hub has is no model in safetensors ({error})"
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        reason = "the hub has no such model" if status in (401, 404) else f"the hub answers {status}"
    except CheckpointError:
        raise
    except Exception as error:  # whichever HTTP library the hub's client uses has errors of its own
        if not isinstance(error, OSError) and type(error).__module__.partition(".")[0].rstrip("2") != "httpx":
            raise
        reason = f"it could not be downloaded ({error})"
    raise DownloadError(f"model={name!r}: no such folder here, and {reason}")


@dataclass(frozen=True, slots=True)
class HubModel:
    """One commit of a model on the hub. `files`: bytes of each file that a checkpoint has, by name."""

    name: str
    commit: str
    files: dict[str, int]
    checksums: dict[str, str]  # of the hub, by file

    @classmethod
    def find(cls, name: str) -> HubModel:
        """The model's newest commit. Raises CheckpointError with the reason where there is none."""
        from huggingface_hub import HfApi

        with hub_errors(name):
            info = HfApi().model_info(name, files_metadata=True)
        files, checksums = {}, {}
        for one in info.siblings or ():
            if is_plain_name(one.rfilename) and any(fnmatch(one.rfilename, pattern) for pattern in _WANTED):
                files[one.rfilename] = one.size or 0
                checksums[one.rfilename] = one.lfs.sha256 if one.lfs is not None else str(one.blob_id)
        if info.sha is None or "config.json" not in files:
            raise CheckpointError(f"model={name!r}: the hub's model has no config.json; it is none of transformers")
        return cls(name, info.sha, files, checksums)

    @property
    def weights(self) -> list[str]:
        """The files of weights, judged by their names; `checkpoint` checks their headers."""
        if SINGLE_NAME in self.files:
            return [SINGLE_NAME]
        return sorted(one for one in self.files if one.endswith(".safetensors"))

    def identity(self, config: bytes) -> str:
        """The identity of the weights, from the hub's checksums. The same files in a folder have another identity."""
        digest = hashlib.sha256(b"hub" + config)
        for name in self.weights:
            digest.update(f"{name} {self.checksums[name]}\n".encode())
        return digest.hexdigest()

    def fetch_small_files(self, folder: Path) -> None:
        """Bring config, tokenizer, index and other small files into `folder`."""
        for name in sorted(self.files):
            if not name.endswith(".safetensors"):
                self.fetch(name, folder)

    def fetch(self, name: str, folder: Path) -> None:
        """Bring the file, or a link into the hub's cache, into `folder`. An interrupted download is continued. Raises
        CheckpointError where the download fails, or has another size than the hub says.
        """
        from huggingface_hub import hf_hub_download, try_to_load_from_cache

        path = folder / name
        cached = try_to_load_from_cache(self.name, name, revision=self.commit)
        if isinstance(cached, str):
            with store_errors(folder, f"linking {name}"):
                path.unlink(missing_ok=True)
                path.symlink_to(Path(cached).resolve())
        else:  # the hub's client notices a file of another commit
            if path.is_symlink():
                path.unlink()
            with hub_errors(self.name):
                hf_hub_download(self.name, name, revision=self.commit, local_dir=folder)
        size = path.stat().st_size
        if size != self.files[name]:
            raise DownloadError(f"{path}: {size} bytes, but the hub says {self.files[name]}")

    def checkpoint(self, folder: Path) -> Checkpoint:
        """The checkpoint with the shapes of all tensors, by range requests, but no values. `folder` has the small
        files. A file's tensors can be read after `arrived` was called for it. Raises CheckpointError.
        """
        from huggingface_hub import HfApi
        from huggingface_hub.utils import disable_progress_bars, enable_progress_bars

        config = read_json_object(folder / "config.json", CheckpointError)
        disable_progress_bars()
        try:
            with hub_errors(self.name):
                found = HfApi().get_safetensors_metadata(self.name, revision=self.commit)
        except (TypeError, ValueError, AttributeError) as error:  # of headers that the hub's client does not check
            raise CheckpointError(f"model={self.name!r}: the headers of its weights are damaged ({error})") from None
        finally:
            enable_progress_bars()
        tensors = {}
        for file_name, of_file in found.files_metadata.items():
            if not is_plain_name(file_name) or file_name not in self.files:
                raise CheckpointError(f"model={self.name!r}: {INDEX_NAME} names {file_name!r:.80}, which is not there")
            for name, told in of_file.tensors.items():
                entry = {"dtype": told.dtype, "shape": told.shape, "data_offsets": list(told.data_offsets)}
                where = f"model={self.name!r}: {file_name}: tensor {name!r}"
                info = tensor_info(where, entry, 0, CheckpointError)
                tensors[name] = TensorRef(folder / file_name, info.dtype, info.shape, _UNKNOWN_OFFSET, info.nbytes)
        shapes = {name: ref.shape for name, ref in tensors.items()}
        check_claims(folder / "config.json", config, shapes, CheckpointError)
        return Checkpoint(folder, config, tensors, {})


def arrived(checkpoint: Checkpoint, path: Path) -> None:
    """A file of a hub checkpoint's tensors has arrived. Raises CheckpointError where it is not what the hub said."""
    tensors = checkpoint.tensors
    assert isinstance(tensors, dict)
    for name, info in read_safetensors_header(path, CheckpointError).items():
        before = tensors.get(name)
        if before is None or (before.dtype, before.shape) != (info.dtype, info.shape) or before.path != path:
            raise CheckpointError(f"{path}: tensor {name!r} is not what the hub's headers say")
        tensors[name] = TensorRef(path, info.dtype, info.shape, info.begin, info.nbytes)
