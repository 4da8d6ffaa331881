"""This process: instructions and caches that torch may use, memory to give back after loading, memory in use."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import gc
import multiprocessing
import os
import re
import resource
import signal
from collections.abc import Callable
from pathlib import Path

# -- instructions that the processor names and then traps --------------------------------------------------------------


VARIABLE = "ONEDNN_MAX_CPU_ISA"
"""Read by oneDNN, torch's matrix products on a CPU, at its first use."""

WITHOUT_AMX = "AVX512_CORE_FP16"

_PATIENCE_S = 30.0


def _multiply() -> None:
    """A product for which oneDNN uses AMX, on one thread: a child of a threaded process must not start threads."""
    import torch

    faulthandler.disable()  # dying is an answer, not a crash to report
    torch.set_num_threads(1)
    torch.nn.functional.linear(*(torch.ones(32, 64, dtype=torch.bfloat16) for _ in range(2)))


def keep_off_trapped_instructions(
    cpuinfo: Path = Path("/proc/cpuinfo"), multiply: Callable[[], object] = _multiply
) -> bool:
    """Switch AMX off where using it would end the process with SIGILL. True where that was needed.

    A hypervisor may show AMX's feature bit but hide the CPUID leaf that describes its tiles; oneDNN then dies in the
    first bfloat16 product. A child process tries such a product, unless the processor has no AMX or the variable is
    set. Call this before torch multiplies for the first time.
    """
    names_amx = False
    with contextlib.suppress(OSError):
        names_amx = bool(re.search(r"^flags\b.*\bamx_tile\b", cpuinfo.read_text(), re.MULTILINE))
    if VARIABLE in os.environ or not names_amx or _survives(multiply):
        return False
    os.environ[VARIABLE] = WITHOUT_AMX
    return True


@functools.cache
def _survives(multiply: Callable[[], object]) -> bool:
    """Whether a child that multiplies is not killed by an illegal instruction. A child that hangs counts as killed.
    Tried once: later oneDNN has chosen its instructions, and threads run that must not be forked.
    """
    child = multiprocessing.get_context("fork").Process(target=multiply)
    child.start()
    child.join(_PATIENCE_S)
    hangs = child.exitcode is None
    child.kill()
    child.join()
    return not hangs and child.exitcode != -signal.SIGILL


# -- memory beside weights ---------------------------------------------------------------------------------------------


PRIMITIVES = 16
"""Shapes of products for which oneDNN keeps compiled code. A decode step has about ten."""

VARIABLES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""Read by oneDNN, and by torch's cache of its operations, at their first use."""

LARGE_NBYTES = 1 << 20

_MMAP_THRESHOLD = -3  # of mallopt
_DONT_NEED = 4  # MADV_DONTNEED
_CODE = re.compile(
    r"^([0-9a-f]+)-([0-9a-f]+) r-xp \S+ \S+ \d+ +/.*(?<! \(deleted\))\n(?:[A-Z].*\n)*?Rss: +(\d+) kB\n"
    r"(?:[A-Z].*\n)*?Anonymous: +0 kB$",
    re.MULTILINE,
)
"""(begin, end, resident KiB) of a mapping of a file's code in smaps, none of which is a copy."""


def keep_few_primitives() -> None:
    """Let oneDNN keep code for `PRIMITIVES` shapes instead of 1024, unless the environment says otherwise.

    Each number of rows that an expert gets in a prompt is a shape: after a few prompts hundreds of them took 130 MB.
    Compiling one again takes no measurable time. Call this before torch multiplies.
    """
    for name in VARIABLES:
        os.environ.setdefault(name, str(PRIMITIVES))


def give_back_large_blocks() -> None:
    """From now on the C library gives memory of `LARGE_NBYTES` and more back to the system when it is freed.

    By default it keeps freed blocks of up to 32 MiB, and prompts of other lengths need other sizes. With a threshold of
    4 MiB it would still keep oneDNN's float32 results, 30 MiB on processors without bfloat16 instructions.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_MMAP_THRESHOLD, LARGE_NBYTES)


def give_back_heap() -> None:
    """Give free memory of the C library's heap back to the system; imports leave some."""
    gc.collect()
    trim_heap()


def trim_heap() -> None:
    """The same without looking for garbage. It takes milliseconds, in which other threads of Python run."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


def give_back_code() -> int:
    """Give resident pages of libraries' code back to the system. Returns their bytes.

    Most of it ran only during imports; code that runs again comes back from the page cache. Does nothing without
    /proc/self/smaps.
    """
    library = ctypes.CDLL(None)
    try:
        smaps = Path("/proc/self/smaps").read_text(errors="replace")  # names of files may be in any encoding
    except OSError:
        return 0
    given_nbytes = 0
    for begin, end, resident_nbytes in code_in(smaps):
        if library.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _DONT_NEED) == 0:
            given_nbytes += resident_nbytes
    return given_nbytes


def code_in(smaps: str) -> list[tuple[int, int, int]]:
    """(begin, end, resident bytes) of unmodified mappings of files' code, which can be read again."""
    return [(int(begin, 16), int(end, 16), int(kib) << 10) for begin, end, kib in _CODE.findall(smaps)]


def rss_nbytes() -> int:
    """Resident memory of this process, code included; the peak, where the system does not tell the current value."""
    return _status_nbytes("VmRSS") or peak_rss_nbytes()


def peak_rss_nbytes() -> int:
    """Peak resident memory, from VmHWM if there is one: `ru_maxrss` includes the parent's at the time of the fork."""
    return _status_nbytes("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _status_nbytes(name: str) -> int:
    """A line of /proc/self/status; 0 where it is missing."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) << 10
    return 0
