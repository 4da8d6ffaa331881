"""Names what to install where the compiled code cannot be built; pyproject.toml has all settings."""

from setuptools import setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError


class BuildCompiled(build_ext):
    def build_extensions(self) -> None:
        try:
            super().build_extensions()
        except CompileError as error:
            needed = (
                "expertly needs a C compiler and the C library's headers: apt install gcc libc6-dev, say, and again"
            )
            raise CompileError(f"{needed} ({error})") from None


setup(cmdclass={"build_ext": BuildCompiled})
