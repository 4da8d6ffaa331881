"""The `expertly` command: one module a subcommand, a function of one frozen dataclass of options each (`frame.py`).

Nothing here imports torch before a command runs, so that `expertly --help` answers at once.
"""
