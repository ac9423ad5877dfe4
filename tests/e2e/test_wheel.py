"""A wheel in an environment of its own, from a folder in which nothing of the checkout can be
seen.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
BUILT_FROM = (
    "pyproject.toml",
    "setup.py",
    "MANIFEST.in",
    "README.md",
    "LICENSE",
    "train.py",
    "train_async.py",
)

pytestmark = [pytest.mark.slow, pytest.mark.real, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an environment that has slime from a wheel, and its dependencies from the
    environment of the tests.

    Nothing is downloaded, so setuptools is the one of the tests.
    """
    folder = tmp_path_factory.mktemp("wheel")
    source, env = folder / "source", folder / "env"
    shutil.copytree(
        CHECKOUT / "slime", source / "slime", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in BUILT_FROM:
        shutil.copy(CHECKOUT / name, source / name)
    pip = [sys.executable, "-m", "pip"]
    build = [
        *pip,
        "wheel",
        "--no-index",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(folder),
        str(source),
    ]
    run(build, folder)
    run([sys.executable, "-m", "venv", "--without-pip", str(env)], folder)
    (wheel,) = folder.glob("slime_rl-*.whl")
    run(
        [
            *pip,
            "--python",
            str(env / "bin" / "python"),
            "install",
            "--no-index",
            "--no-deps",
            str(wheel),
        ],
        folder,
    )
    shutil.rmtree(source)
    (site,) = env.glob("lib/python3*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return env


def run(command: list[str], folder: Path) -> str:
    """The output of a command that must succeed."""
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=folder, env=kept, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_package_is_complete(environment: Path, tmp_path: Path) -> None:
    code = "import slime; print(slime.__file__)"
    assert run([str(environment / "bin" / "python"), "-c", code], tmp_path).startswith(
        str(environment)
    )
    (site,) = environment.glob("lib/python3*/site-packages")
    missing = [
        file.relative_to(CHECKOUT)
        for file in (CHECKOUT / "slime").rglob("*")
        if file.is_file()
        and "__pycache__" not in file.parts
        and not (site / file.relative_to(CHECKOUT)).is_file()
    ]
    assert not missing, "these files of the package are not in the wheel"


@pytest.mark.parametrize("command", ["train", "train-async"])
def test_help_without_the_checkout(environment: Path, tmp_path: Path, command: str) -> None:
    said = run([str(environment / "bin" / "slime"), command, "--help"], tmp_path)
    assert said.startswith(f"usage: slime {command} [flags]")
    assert "--tensor-model-parallel-size" in said and "--rollout-batch-size" in said


def test_it_trains_without_the_checkout(
    environment: Path, tmp_path: Path, flags: list[object]
) -> None:
    words = [*map(str, flags), "--num-rollout", "2", "--run-name", "wheel"]
    run([str(environment / "bin" / "slime"), "train", *words], tmp_path)
    assert (tmp_path / "outputs" / "wheel" / "summary.json").is_file()
