"""Puts the two training loops into the wheel, in which ``slime train`` runs the files that a
checkout has at its top.

Everything else about the package is in pyproject.toml.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

LOOPS = ("train.py", "train_async.py")


class BuildWithLoops(build_py):
    """Copies the loops into ``slime/cli/loops`` of the build. An editable installation uses those
    of the checkout.
    """

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        folder = Path(self.build_lib) / "slime" / "cli" / "loops"
        folder.mkdir(parents=True, exist_ok=True)
        for name in LOOPS:
            self.copy_file(name, str(folder / name))


setup(cmdclass={"build_py": BuildWithLoops})
