"""Files: written completely or not at all, never through a link, deleted by name, locked; and messages for when the
disk refuses.

`core/untrusted.py` reads them.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import math
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from expertly.core.errors import ExpertlyError

_MARKED_NBYTES = 16 << 20
"""A file's mark is among its first so many bytes."""


@contextmanager
def disk_errors(folder: Path, doing: str, failure: type[ExpertlyError], other_folder: str) -> Iterator[None]:
    """Turn an OSError while writing below `folder` into a `failure` that says what the user can do; `other_folder`: how
    to choose another folder (" with --out").
    """
    try:
        yield
    except OSError as error:
        raise failure(f"{folder}: {doing} failed: {_reason(folder, error, other_folder)}") from error


def _reason(folder: Path, error: OSError, other_folder: str) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        try:
            free = f", {shutil.disk_usage(existing_parent(folder)).free} bytes are free"
        except OSError:
            free = ""
        return f"the disk is full{free}; make room (or choose another folder) and run again"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR):
        return f"not writable ({error.strerror}); choose another folder{other_folder}"
    return error.strerror or str(error)


def existing_parent(path: Path) -> Path:
    """The nearest existing folder at or above `path`."""
    path = path.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def write_atomic(path: Path, data: bytes, mark: bytes = b"") -> None:
    """Replace `path` by `data`, as `replacing` does."""
    with replacing(path, mark) as file:
        file.write(data)


@contextmanager
def replacing(path: Path, mark: bytes = b"") -> Iterator[BinaryIO]:
    """An empty file that takes the place of `path` when the block ends, and is removed when it fails.

    After a crash `path` holds either all that was written or what it held before. Writers of the same path (threads or
    processes) wait for each other, and the last one wins. A killed writer leaves one hidden file, which the next one
    uses. Nothing is written through a link: raises FileExistsError where `path` or the hidden file is a link, a folder,
    a pipe or a device, or where `path` is not empty and lacks `mark`, which all files of its kind have.
    """
    check_replaceable(path, mark)
    temporary = path.with_name(f".{path.name}.tmp")
    with os.fdopen(lock_file(temporary), "r+b") as file:
        try:
            file.truncate()
            yield file
            file.flush()
            os.fsync(file.fileno())
            check_replaceable(path, mark)  # something may have come meanwhile
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # closing is not enough where a forked child has it, too
    sync_folder(path.parent)


def check_replaceable(path: Path, mark: bytes = b"") -> None:
    """Raises FileExistsError where `replacing` would."""
    about = _of_kind(path, stat.S_ISREG)
    if mark and about is not None and about.st_size and not has_mark(path, mark):
        raise FileExistsError(errno.EEXIST, "a file is in the way that is not expertly's: it stays", str(path))


def has_mark(path: Path, mark: bytes) -> bool:
    """Whether a regular file, and no link, has these bytes."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    with os.fdopen(fd, "rb") as file:
        return stat.S_ISREG(os.fstat(fd).st_mode) and mark in file.read(_MARKED_NBYTES)


def _in_the_way(path: Path, about: os.stat_result) -> FileExistsError:
    kind = kind_of_file(about.st_mode)
    return FileExistsError(errno.EEXIST, f"{kind} is in the way ({path.name!r:.80}): it stays", str(path))


def kind_of_file(mode: int) -> str:
    """`a file`, `a link`, ..., by the mode that the system says."""
    kinds = (
        *((stat.S_ISREG, "a file"), (stat.S_ISDIR, "a folder"), (stat.S_ISLNK, "a link")),
        *((stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket")),
    )
    return next((name for is_kind, name in kinds if is_kind(mode)), "a device")


def _of_kind(path: Path, is_kind: Callable[[int], bool]) -> os.stat_result | None:
    """What is at `path`, a link not followed; None: nothing. Raises FileExistsError where it is of another kind."""
    try:
        about = os.lstat(path)
    except FileNotFoundError:
        return None
    if not is_kind(about.st_mode):
        raise _in_the_way(path, about)
    return about


def create(path: Path, flags: int = 0) -> int:
    """The descriptor of a new file, for writing. A regular file that is there, and no link, is deleted first. Raises
    FileExistsError where something else is there.
    """
    if _of_kind(path, stat.S_ISREG) is not None:
        path.unlink(missing_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | flags, 0o666)


def check_folder(path: Path) -> None:
    """Raises FileExistsError where something other than a folder, such as a link to one, is at `path`."""
    _of_kind(path, stat.S_ISDIR)


def remove_folder(folder: Path, is_ours: Callable[[str], bool], *, last: str = "") -> list[str]:
    """Delete the files of a folder whose names are ours, `last` behind all others, and the folder where nothing stays
    in it. Returns the names that stay: those of links and folders, too. Raises FileExistsError where it is a link.
    """
    check_folder(folder)
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        kept = []
        for name in sorted(os.listdir(fd), key=lambda name: (name == last, name)):
            with suppress(FileNotFoundError):  # another process was first
                mode = os.lstat(name, dir_fd=fd).st_mode
                if is_ours(name) and stat.S_ISREG(mode):
                    os.unlink(name, dir_fd=fd)
                else:
                    kept.append(name)
    finally:
        os.close(fd)
    if not kept:
        with suppress(FileNotFoundError):
            folder.rmdir()
    return kept


# -- locks -------------------------------------------------------------------------------------------------------------


def lock_file(path: Path) -> int:
    """The descriptor of the file at `path`, made where it is missing, and locked: see `_take_lock`. It follows no link,
    and does not wait, as opening a pipe would. Raises FileExistsError where something other than a regular file with
    one name is there, FileNotFoundError where its folder is not.
    """
    while True:
        _of_kind(path, stat.S_ISREG)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        try:
            about = os.fstat(fd)
            if not stat.S_ISREG(about.st_mode) or about.st_nlink > 1:
                raise _in_the_way(path, about)
            _take_lock(fd, path)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), os.lstat(path)):
                    return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # who had the lock has renamed the file, or its folder, in the meantime


def _take_lock(fd: int, path: Path) -> None:
    """Lock an open file. While another process has the lock, names it and waits. File systems without locks must do
    without.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = name_of_holder(fd)
        logging.getLogger("expertly").warning("waiting for %s, which has locked %s", holder, path)
        fcntl.flock(fd, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
            raise


def name_of_holder(fd: int) -> str:
    """The process that has locked an open file, as far as the system says."""
    about = os.fstat(fd)
    place = f"{os.major(about.st_dev):02x}:{os.minor(about.st_dev):02x}:{about.st_ino}"
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()  # 1: FLOCK ADVISORY WRITE 708 fe:00:1034 0 EOF
            if words[1] == "FLOCK" and words[5] == place and int(words[4]) > 0:
                return f"process {words[4]}"
    return "another process"


def sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def json_bytes(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()


def finite(value: Any) -> Any:
    """`value` with null in place of NaN and infinities, which JSON does not have, at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value
