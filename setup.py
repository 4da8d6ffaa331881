"""Compiles the control plane and the simulator's loop with mypyc where a wheel is made; pyproject.toml says all else.

An editable install runs the sources, so that an edit counts at once. Without a C compiler a wheel holds the sources
alone: everything runs, decisions take two to five times as long (docs/log.md).
"""

import os
import sys

from setuptools import setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, LinkError

SCHEDULER = "cache counters loop observations prefetch prefetch_gate running scheduler slots"
COMPILED = [
    *(f"src/expertly/scheduler/{name}.py" for name in SCHEDULER.split()),
    *(f"src/expertly/sim/{name}.py" for name in ("compute", "link", "metrics", "simulator")),
]
"""Not core/: a compiled dataclass that is frozen cannot be copied or pickled."""


def compiled_modules():
    """Extensions of these modules; none where mypyc is missing or refuses them."""
    if "bdist_wheel" not in sys.argv:
        return []
    if missing := [path for path in COMPILED if not os.path.exists(path)]:
        raise FileNotFoundError(f"setup.py compiles modules that do not exist: {', '.join(missing)}")
    try:
        from mypyc.build import mypycify

        level = os.environ.get("EXPERTLY_OPT_LEVEL", "2")  # "0": compiled in a third of the time, for tests
        return mypycify(["--config-file", "mypyc.ini", *COMPILED], opt_level=level, debug_level="0")
    except (ImportError, SystemExit) as error:
        print(f"the control plane is not compiled: {error}", file=sys.stderr)
        return []


MODULES = compiled_modules()


class BuildExt(build_ext):
    """Goes on without the compiled modules where compiling one of them fails."""

    def build_extensions(self):
        try:
            super().build_extensions()
        except (CompileError, LinkError) as error:
            print(f"the control plane is not compiled: {error}", file=sys.stderr)
            self.extensions = [one for one in self.extensions if one not in MODULES]
            super().build_extensions()


setup(ext_modules=MODULES, cmdclass={"build_ext": BuildExt})
