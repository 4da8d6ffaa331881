"""The `expertly` command: one module a subcommand, each with `add_parser(subparsers)` and `run(args) -> int`.

Nothing here imports torch outside `run`, so that `expertly --help` answers at once.
"""
