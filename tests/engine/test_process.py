from __future__ import annotations

import subprocess
import sys

from expertly.engine.process import peak_rss_nbytes

MIB = 1 << 20


def test_peak_counts_memory_that_was_given_back():
    before = peak_rss_nbytes()
    block = bytearray(before + 64 * MIB)
    del block
    assert peak_rss_nbytes() >= before + 64 * MIB


def test_peak_is_of_this_process_not_of_the_one_that_started_it():
    block = bytearray(256 * MIB)
    code = "from expertly.engine.process import peak_rss_nbytes; print(peak_rss_nbytes())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert 5 * MIB < int(done.stdout) < len(block)
