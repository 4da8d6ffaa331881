"""The `expertly` command: one module a subcommand, a function of one frozen dataclass of options each (`frame.py`).

Nothing here imports torch before a command runs, so that `expertly --help` answers at once.
"""

import os

# NumPy's products are small here: its threads would only take processors from the kernels and from other processes.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
