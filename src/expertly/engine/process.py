"""What this process takes of the machine."""

from __future__ import annotations

import resource
from pathlib import Path


def peak_rss_nbytes() -> int:
    """Most memory this process ever had resident.

    From VmHWM where there is one: `ru_maxrss` also counts the parent as it was when it forked us.
    """
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
