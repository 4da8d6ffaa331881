"""This process: what torch may use and keep in it, what it gives back after loading, and what it has taken."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import gc
import os
import re
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

# -- instructions that the processor names and then traps --------------------------------------------------------------


VARIABLE = "ONEDNN_MAX_CPU_ISA"
"""What oneDNN, which multiplies matrices for torch on a CPU, reads when it is first used."""

WITHOUT_AMX = "AVX512_CORE_FP16"

_PATIENCE_S = 30.0


def keep_off_trapped_instructions(
    cpuinfo: Path = Path("/proc/cpuinfo"), multiply: Callable[[], object] | None = None
) -> bool:
    """Switch AMX off where using it would end the process with SIGILL. True where that was needed.

    A hypervisor may show the feature bit of AMX and hide the leaf that describes its tiles: oneDNN then configures none
    and dies in the first bfloat16 product. Found out by a child that multiplies; nothing is tried where the processor
    has no AMX or the variable is set. Must run before torch multiplies for the first time.
    """
    if VARIABLE in os.environ or not _names_amx(cpuinfo):
        return False
    if _works_here() if multiply is None else _survives(multiply):
        return False
    os.environ[VARIABLE] = WITHOUT_AMX
    return True


def _names_amx(cpuinfo: Path) -> bool:
    with contextlib.suppress(OSError):
        flags = next((line for line in cpuinfo.read_text().splitlines() if line.startswith("flags")), "")
        return "amx_tile" in flags.split()
    return False


def _multiply() -> None:
    """A product that is worth tiles to oneDNN, on one thread: a child of a threaded process must not start any."""
    import torch

    torch.set_num_threads(1)
    torch.nn.functional.linear(*(torch.ones(32, 64, dtype=torch.bfloat16) for _ in range(2)))


@functools.cache
def _works_here() -> bool:
    """Tried once a process: later oneDNN has made up its mind, and threads may run that a child must not inherit."""
    return _survives(_multiply)


def _survives(multiply: Callable[[], object]) -> bool:
    """Whether a child that multiplies is not killed by an illegal instruction. What does not end
    counts as killed: slower products are better than none.
    """
    child = os.fork()
    if not child:
        status = 1
        try:
            faulthandler.disable()  # dying of it is an answer, not a crash to report
            multiply()
            status = 0
        finally:
            os._exit(status)
    end = time.monotonic() + _PATIENCE_S
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return not (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGILL)
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


# -- memory beside weights ---------------------------------------------------------------------------------------------


PRIMITIVES = 16
"""Shapes of products whose compiled code oneDNN keeps; a decoded token has about ten."""

VARIABLES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""What oneDNN, and torch's own cache of its operations, read when they are first used."""

LARGE_NBYTES = 1 << 20

_MMAP_THRESHOLD = -3  # of mallopt
_DONT_NEED = 4  # MADV_DONTNEED
_MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ \d+\s*(.*)$")


def keep_few_primitives() -> None:
    """Let oneDNN keep the code of `PRIMITIVES` shapes instead of 1024, unless the environment says otherwise.

    Each number of rows that an expert gets in a prompt is a shape of its own, so that after a few prompts hundreds of
    them took 130 MB. Making one again takes less time than can be measured. Must run before torch multiplies.
    """
    for name in VARIABLES:
        os.environ.setdefault(name, str(PRIMITIVES))


def give_back_large_blocks() -> None:
    """From now on the C library gives memory of `LARGE_NBYTES` and more back to the system when it is freed.

    By itself it keeps such blocks, up to 32 MiB, once one has been freed: prompts of other lengths need other sizes,
    and those of a GGUF model with wide experts took 59 MiB where 27 were in use. From 4 MiB on would leave it oneDNN's
    results in float32, 30 MiB where the processor has no instructions for bfloat16 (docs/log.md).
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_MMAP_THRESHOLD, LARGE_NBYTES)


def give_back_heap() -> None:
    """Give back free memory of the C library's heap; importing leaves some."""
    gc.collect()
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


def give_back_code() -> int:
    """Give back to the system pages of libraries' code; bytes that are resident no more.

    Most of it ran while they were imported, and what runs again comes back from the page cache. Does nothing where
    there is no /proc/self/smaps.
    """
    library = ctypes.CDLL(None, use_errno=True)
    try:
        smaps = Path("/proc/self/smaps").read_text()
    except OSError:
        return 0
    given_nbytes = 0
    for begin, end, resident_nbytes in _code(smaps):
        if library.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _DONT_NEED) == 0:
            given_nbytes += resident_nbytes
    return given_nbytes


def _code(smaps: str) -> Iterator[tuple[int, int, int]]:
    """(begin, end, resident bytes) of mappings of files' code that nobody has written to: those can be read again."""
    begin = end = resident = anonymous = 0
    is_code = False
    for line in [*smaps.splitlines(), "0-0 ---p 0 0 0"]:
        found = _MAPPING.match(line)
        if found is None:
            name, _, rest = line.partition(":")
            if name == "Rss":
                resident = int(rest.split()[0]) << 10
            elif name == "Anonymous":
                anonymous = int(rest.split()[0]) << 10
            continue
        if is_code and resident and not anonymous:
            yield begin, end, resident
        begin, end = int(found[1], 16), int(found[2], 16)
        is_code = found[3] == "r-xp" and found[4].startswith("/") and not found[4].endswith(" (deleted)")
        resident = anonymous = 0


def rss_nbytes() -> int:
    """Memory that this process has resident, code of libraries included; the most it ever had, where the system does
    not say.
    """
    return _status_nbytes("VmRSS") or peak_rss_nbytes()


def peak_rss_nbytes() -> int:
    """Most memory this process ever had resident.

    From VmHWM where there is one: `ru_maxrss` also counts the parent as it was when it forked us.
    """
    return _status_nbytes("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _status_nbytes(name: str) -> int:
    """0 where there is no such line."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) << 10
    return 0
