"""Compiles on all processors, and names what to install where it cannot be done; pyproject.toml has all settings."""

import os
from concurrent.futures import ThreadPoolExecutor

from setuptools import setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError


class BuildCompiled(build_ext):
    def build_extensions(self) -> None:
        compile_all = self.compiler.compile
        with ThreadPoolExecutor(os.cpu_count()) as pool:

            def compile_each(sources: list[str], **options: object) -> list[str]:
                return list(pool.map(lambda source: compile_all([source], **options)[0], sources))

            self.compiler.compile = compile_each
            try:
                super().build_extensions()
            except CompileError as error:
                needed = (
                    "expertly needs a C compiler and the C library's headers: apt install gcc libc6-dev, say, and again"
                )
                raise CompileError(f"{needed} ({error})") from None


setup(cmdclass={"build_ext": BuildCompiled})
