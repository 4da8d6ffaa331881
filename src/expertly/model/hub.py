"""A model on the hub: its tensors without their values, and its download. Of a repository of GGUF files, one
quantisation is a model.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path

from expertly.core.errors import CheckpointError, DownloadError
from expertly.core.files import existing_parent
from expertly.core.untrusted import GGUF, HEADER, is_plain_name
from expertly.model.quantisations import find_quantisation
from expertly.store.cache import check_space
from expertly.store.checkpoint import ADAPTER_NAME, INDEX_NAME, files_of
from expertly.store.gguf import SUFFIX, GgufFiles
from expertly.store.packed import KIMI_CODE

_WANTED = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", KIMI_CODE, "LICENSE*", "NOTICE*")
_SHA256 = re.compile("[0-9a-f]{64}")

_NAME = re.compile(
    r"(?:(?:https?://)?(?:hf\.co|huggingface\.co)/)?(?P<id>[^/:\s]+(?:/[^/:\s]+)?)/?(?::(?P<tag>[^:\s]+))?"
)

_BEGUN = ".incomplete"
"""Suffix of what there is of a file in the hub's cache."""

_HEAD_NBYTES = 8 << 20
"""Of a GGUF file's beginning that is asked for first: the headers of most, which hold a vocabulary."""

_SHORT_HEAD_NBYTES, _NUM_REQUESTS = 128 << 10, 8
"""The same of a safetensors file; and how many are asked for at a time."""


def split_name(model: str) -> tuple[str, str]:
    """The hub's id in what a user calls a model (`owner/NAME`, `hf.co/owner/NAME:Q4_K_M`), and the quantisation behind
    it; "" where there is none.
    """
    match = _NAME.fullmatch(model)
    return (match["id"], match["tag"] or "") if match else (model, "")


def download(name: str, store: Path | None = None) -> Path:
    """The folder or GGUF file of the hub's model `name`, downloaded or from the hub's own cache. `store`: where a store
    as large as its weights is packed next. Raises CheckpointError with the reason, StoreError before anything is
    downloaded if the disk is too small for both.
    """
    from huggingface_hub import snapshot_download

    hub = HubModel.look_up(name)
    files, first = hub.chosen(split_name(name)[1])
    if first and hub.has(files):
        return hub.cached_path(first)
    hub.check_room(files, store)
    with hub_errors(name):
        for file in files:
            hub.fetch(file)
        return Path(snapshot_download(hub.name, allow_patterns=[glob.escape(file) for file in files]), first)


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
    except errors.HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        reason = "the hub has no such model" if status in (401, 404) else f"the hub answers {status}"
    except Exception as error:  # whichever HTTP library the hub's client uses has errors of its own
        if not isinstance(error, OSError) and type(error).__module__.partition(".")[0].rstrip("2") != "httpx":
            raise
        reason = f"it could not be downloaded ({' '.join(str(error).split())})"
    raise DownloadError(f"model={name!r}: no such folder here, and {reason}")


@dataclass(frozen=True, slots=True)
class HubModel:
    """One commit of a repository on the hub, or of what the hub's cache has of it."""

    name: str
    commit: str
    files: dict[str, int]  # bytes of each file that a checkpoint has, by name
    ggufs: dict[str, int]  # and of each GGUF file, by path
    sha256: dict[str, str] = field(default_factory=dict)  # of large files
    why_cached: DownloadError | None = None  # why it is what the cache has

    @classmethod
    def find(cls, name: str) -> HubModel:
        """The newest commit. Raises DownloadError with the reason where there is none."""
        from huggingface_hub import HfApi

        repository, _ = split_name(name)
        with hub_errors(name):
            info = HfApi().model_info(repository, files_metadata=True)
        siblings = info.siblings or ()
        large = {
            file.rfilename: file.lfs.sha256 for file in siblings if file.lfs and _SHA256.fullmatch(file.lfs.sha256)
        }
        return cls._of(repository, info.sha or "", {file.rfilename: file.size or 0 for file in siblings}, large)

    @classmethod
    def look_up(cls, name: str) -> HubModel:
        """The newest commit, or what the hub's cache has where the hub cannot be reached. Raises DownloadError."""
        try:
            return cls.find(name)
        except DownloadError as error:
            if (kept := cls.cached(split_name(name)[0])) is None:
                raise
            return replace(kept, why_cached=error)

    @classmethod
    def cached(cls, repository: str) -> HubModel | None:
        """What the hub's cache has of the commit that was the newest when it was last asked."""
        folder = _cache_folder(repository)
        try:
            commit = (folder / "refs" / "main").read_text().strip()
            snapshot = folder / "snapshots" / commit
            files = [path for path in snapshot.rglob("*") if path.is_file()]
            sizes = {path.relative_to(snapshot).as_posix(): path.stat().st_size for path in files}
        except OSError:
            return None
        return cls._of(repository, commit, sizes, {})

    @classmethod
    def _of(cls, repository: str, commit: str, sizes: Mapping[str, int], sha256: dict[str, str]) -> HubModel:
        if not is_plain_name(commit):
            raise CheckpointError(f"model={repository!r}: commit={commit!r:.80}: is none")
        plain = {path: size for path, size in sizes.items() if all(map(is_plain_name, path.split("/")))}
        files = {
            name: size
            for name, size in plain.items()
            if "/" not in name and any(fnmatch(name, pattern) for pattern in _WANTED)
        }
        return cls(repository, commit, files, {p: size for p, size in plain.items() if p.endswith(SUFFIX)}, sha256)

    @property
    def is_quantised(self) -> bool:
        """Whether it has GGUF files alone."""
        return bool(self.ggufs) and not self.has_safetensors

    @property
    def has_safetensors(self) -> bool:
        return any(name.endswith(".safetensors") for name in self.files)

    def chosen(self, tag: str) -> tuple[Mapping[str, int], str]:
        """The files of the quantisation `tag` or, where it has GGUF files alone, of the only one, and the first of
        them; else all of a checkpoint, and "". Raises CheckpointError.
        """
        if not tag and not self.is_quantised:
            return self.files, ""
        try:
            files = find_quantisation(self.name, self.ggufs, tag).files
        except CheckpointError as error:
            raise self.why_cached or error from None
        return files, next(iter(files))

    def cached_path(self, file: str) -> Path:
        """Where a file of it is, in the hub's cache."""
        return _cache_folder(self.name) / "snapshots" / self.commit / file

    def has(self, files: Mapping[str, int]) -> bool:
        """Whether the hub's cache has all of these."""
        return all(self.cached_path(file).exists() for file in files)

    def check_room(self, files: Mapping[str, int], store: Path | None) -> None:
        """Compare the free space with what of `files` is to be downloaded, and packed in `store`. Raises StoreError."""
        from huggingface_hub import constants

        if self.has(files):
            return  # who packs it looks
        to_come = (file for file in files if not self.cached_path(file).exists())
        needed = {Path(constants.HF_HUB_CACHE): sum(files[file] - self._begun_nbytes(file) for file in to_come)}
        if store is not None:
            needed[store] = sum(size for file, size in files.items() if file.endswith((".safetensors", SUFFIX)))
        disks = {folder: existing_parent(folder).stat().st_dev for folder in needed}
        for folder in needed:
            on_it = {other: nbytes for other, nbytes in needed.items() if disks[other] == disks[folder]}
            parts = " and ".join(f"{nbytes} in {other}" for other, nbytes in on_it.items())
            purpose = f" to download and pack {self.name} ({parts}; HF_HOME moves the download)"
            check_space(folder, sum(on_it.values()), purpose)

    def _blob(self, file: str) -> Path:
        """Where the hub's cache keeps a large file's bytes."""
        return _cache_folder(self.name) / "blobs" / self.sha256[file]

    def _begun_nbytes(self, file: str) -> int:
        """How much of it an interrupted download left."""
        if file not in self.sha256 or file not in self.ggufs:
            return 0
        try:
            return min(self.ggufs[file], self._blob(file).with_suffix(_BEGUN).stat().st_size)
        except OSError:
            return 0

    def fetch(self, file: str) -> None:
        """Put a large file into the hub's cache, from where an earlier download of it ended: the hub's own client
        begins anew. Raises what that raises.
        """
        from huggingface_hub import constants, hf_hub_url
        from huggingface_hub.file_download import http_get
        from huggingface_hub.utils import WeakFileLock, build_hf_headers
        from huggingface_hub.utils.sha import sha_fileobj

        size = self.ggufs.get(file, 0)
        if not size or file not in self.sha256 or size > constants.MAX_HTTP_DOWNLOAD_SIZE:
            return  # to the hub's own client
        blob = self._blob(file)
        folder = blob.parent.parent
        lock = folder.parent / ".locks" / folder.name / f"{blob.name}.lock"
        for parent in (blob.parent, lock.parent):
            parent.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(lock):
            if blob.exists():
                return
            part = blob.with_suffix(_BEGUN)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            with os.fdopen(os.open(part, flags, 0o666), "r+b") as out:
                begin = out.seek(0, os.SEEK_END)
                if begin > size:
                    begin = out.truncate(out.seek(0))
                url, headers = hf_hub_url(self.name, file, revision=self.commit), build_hf_headers()
                http_get(url, out, resume_size=begin, headers=headers, expected_size=size, displayed_filename=file)
                out.seek(0)
                if begin and sha_fileobj(out).hex() != blob.name:
                    out.truncate(0)
                    raise OSError(f"{file}: what an interrupted download left was damaged; download it again")
            part.replace(blob)

    @contextlib.contextmanager
    def heads(self, tag: str = "") -> Iterator[Path]:
        """The folder, or the GGUF file of the quantisation `tag`, with the headers of its weights alone, by range
        requests: its files, as large as they are but nearly empty, are gone when the block ends. In the hub's cache
        where all of it is there. Raises CheckpointError, also in place of what the block raises.
        """
        files, first = self.chosen(tag)
        if first and self.has(files):
            yield self.cached_path(first)
            return
        with tempfile.TemporaryDirectory(prefix="expertly-") as name:
            folder = Path(name, self.name)
            folder.mkdir(parents=True)
            try:
                if first:
                    self._fetch_gguf_heads(folder, files)
                else:
                    self._fetch_heads(folder)
                yield folder / first
            except CheckpointError as error:
                raise type(error)(str(error).replace(f"{name}/", "")) from None

    def _fetch_gguf_heads(self, folder: Path, files: Mapping[str, int]) -> None:
        names = {folder / file: file for file in files}
        most = {path: min(files[file], GGUF.nbytes) for path, file in names.items()}
        have, first = dict.fromkeys(names, 0), next(iter(names))
        short = list(names)
        while short:
            for path in short:
                end = min(most[path], max(_HEAD_NBYTES, 4 * have[path]))
                self._fetch_range(names[path], folder, have[path], end)
                have[path] = end
            try:
                headers = GgufFiles.open(first).headers
                short = [path for path in names if len(headers[path.name]) > have[path]]
            except CheckpointError as error:  # zeros are no header
                short = [path for path in names if str(error).startswith(f"{path}:")] or [first]
                short = [path for path in short if have[path] < most[path]]
                if not short:
                    raise

    def _fetch_heads(self, folder: Path) -> None:
        """Of a checkpoint: what decides about its tensors."""
        if "config.json" not in self.files and ADAPTER_NAME not in self.files:
            problem = "the hub's model has no config.json; it is none of transformers"
            raise CheckpointError(f"model={self.name!r}: {problem}")
        for name, size in self.files.items():
            if name in ("config.json", INDEX_NAME, ADAPTER_NAME, "hf_quant_config.json"):
                self._fetch_range(name, folder, 0, size)
            elif name.endswith(".safetensors"):
                (folder / name).touch()

        def fetch(name: str) -> None:
            path, size = folder / name, self.files[name]
            self._fetch_range(name, folder, 0, min(size, _SHORT_HEAD_NBYTES))
            with path.open("rb") as file:
                end = 8 + int.from_bytes(file.read(8), "little")
            if _SHORT_HEAD_NBYTES < end <= 8 + HEADER.nbytes:  # else who reads it says what is wrong
                self._fetch_range(name, folder, _SHORT_HEAD_NBYTES, min(size, end))

        with ThreadPoolExecutor(_NUM_REQUESTS) as pool:
            for _ in pool.map(fetch, [name for name in files_of(folder)[0] if name in self.files]):
                pass

    def _fetch_range(self, file: str, folder: Path, begin: int, end: int) -> None:
        """Write a part of a file to where it belongs in one in `folder` that is as large."""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

        url, path = hf_hub_url(self.name, file, revision=self.commit), folder / file
        headers = {**build_hf_headers(), "Range": f"bytes={begin}-{end - 1}"}
        path.parent.mkdir(parents=True, exist_ok=True)
        with (
            hub_errors(self.name),
            path.open("r+b" if begin else "wb") as out,
            get_session().stream("GET", url, headers=headers, follow_redirects=True) as response,
        ):
            hf_raise_for_status(response)
            if response.status_code != 206 and begin:
                raise OSError(f"{file}: the hub gives no part of it")
            out.seek(begin)
            for chunk in response.iter_bytes():
                out.write(chunk[: end - out.tell()])
                if out.tell() == end:
                    break
            out.truncate(self.files.get(file) or self.ggufs[file])


def _cache_folder(repository: str) -> Path:
    """The folder of a repository in the hub's cache."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE, f"models--{repository.replace('/', '--')}")
