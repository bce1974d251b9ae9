"""What pyproject.toml cannot say: a wheel carries configs/ and csrc/ inside the package."""

from pathlib import Path
from shutil import copytree

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithFolders(build_py):
    """Copies both folders below moerl/ (see moerl/runtime/resources.py), unless editable."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for folder in ("configs", "csrc"):
            copytree(folder, Path(self.build_lib, "moerl", folder), dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithFolders})
