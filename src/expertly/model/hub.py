"""A model on the hub: its tensors without their values, and its download."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from expertly.core.errors import CheckpointError, DownloadError
from expertly.core.files import existing_parent
from expertly.core.headers import tensor_info
from expertly.core.untrusted import CONFIG, is_plain_name, read_json_object
from expertly.store.cache import check_space
from expertly.store.checkpoint import INDEX_NAME, Checkpoint, TensorRef, check_claims

_WANTED = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "LICENSE*", "NOTICE*")
_UNKNOWN_OFFSET = -1


def download(name: str, store: Path | None = None) -> Path:
    """The folder of the hub's model `name`, downloaded or from the hub's own cache. `store`: where a store as large as
    its weights is packed next. Raises CheckpointError with the reason, StoreError before anything is downloaded if the
    disk is too small for both.
    """
    from huggingface_hub import snapshot_download

    _check_room(name, store)
    with hub_errors(name):
        return Path(snapshot_download(name, allow_patterns=list(_WANTED), ignore_patterns=["*/*"]))


def _check_room(name: str, store: Path | None) -> None:
    """Compare the free space with what is to be downloaded and packed; not where the hub does not answer."""
    from huggingface_hub import constants, try_to_load_from_cache

    try:
        hub = HubModel.find(name)
    except CheckpointError:
        return
    kept = {file for file in hub.files if isinstance(try_to_load_from_cache(name, file, revision=hub.commit), str)}
    if len(kept) == len(hub.files):
        return  # who packs it looks
    needed = {Path(constants.HF_HUB_CACHE): sum(size for file, size in hub.files.items() if file not in kept)}
    if store is not None:
        needed[store] = sum(size for file, size in hub.files.items() if file.endswith(".safetensors"))
    disks = {folder: existing_parent(folder).stat().st_dev for folder in needed}
    for folder in needed:
        on_it = {other: nbytes for other, nbytes in needed.items() if disks[other] == disks[folder]}
        parts = " and ".join(f"{nbytes} in {other}" for other, nbytes in on_it.items())
        check_space(folder, sum(on_it.values()), f" to download and pack {name} ({parts}; HF_HOME moves the download)")


@contextlib.contextmanager
def hub_errors(name: str) -> Iterator[None]:
    """Turn exceptions of the hub's client into a DownloadError with the reason."""
    from huggingface_hub import errors

    try:
        yield
        return
    except errors.HFValidationError:
        reason = "not a hub id either (name or owner/name; a prompt stands behind the model)"
    except errors.GatedRepoError:
        reason = "the hub has it, but wants you to accept its terms and log in (hf auth login)"
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        reason = "the hub cannot be reached, and its cache here does not have it"
    except (errors.NotASafetensorsRepoError, errors.SafetensorsParsingError) as error:
        reason = f"what the hub has is no model in safetensors ({error})"
    except errors.HfHubHTTPError as error:
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

    @classmethod
    def find(cls, name: str) -> HubModel:
        """The model's newest commit. Raises CheckpointError with the reason where there is none."""
        from huggingface_hub import HfApi

        with hub_errors(name):
            info = HfApi().model_info(name, files_metadata=True)
        files = {
            file.rfilename: file.size or 0
            for file in info.siblings or ()
            if is_plain_name(file.rfilename) and any(fnmatch(file.rfilename, pattern) for pattern in _WANTED)
        }
        if info.sha is None or "config.json" not in files:
            raise CheckpointError(f"model={name!r}: the hub's model has no config.json; it is none of transformers")
        return cls(name, info.sha, files)

    def checkpoint(self) -> Checkpoint:
        """The checkpoint with the shapes of all tensors, by range requests, but no values. Raises CheckpointError."""
        from huggingface_hub import HfApi, hf_hub_download
        from huggingface_hub.utils import disable_progress_bars, enable_progress_bars

        disable_progress_bars()
        try:
            with hub_errors(self.name):
                path = Path(hf_hub_download(self.name, "config.json", revision=self.commit))
                config = read_json_object(path, CheckpointError, CONFIG)
                headers = HfApi().get_safetensors_metadata(self.name, revision=self.commit)
        except (TypeError, ValueError, AttributeError) as error:  # of headers that the hub's client does not check
            raise CheckpointError(f"model={self.name!r}: the headers of its weights are damaged ({error})") from None
        finally:
            enable_progress_bars()
        tensors = {}
        for file_name, of_file in headers.files_metadata.items():
            if not is_plain_name(file_name) or file_name not in self.files:
                raise CheckpointError(f"model={self.name!r}: {INDEX_NAME} names {file_name!r:.80}, which is not there")
            for name, told in of_file.tensors.items():
                entry = {"dtype": told.dtype, "shape": told.shape, "data_offsets": list(told.data_offsets)}
                label = f"model={self.name!r}: {file_name}: tensor {name!r}"
                info = tensor_info(label, entry, 0, CheckpointError)
                tensors[name] = TensorRef(path.parent / file_name, info.dtype, info.shape, _UNKNOWN_OFFSET, info.nbytes)
        shapes = {name: ref.shape for name, ref in tensors.items()}
        check_claims(path, config, shapes, CheckpointError)
        return Checkpoint(path.parent, config, tensors, {})
