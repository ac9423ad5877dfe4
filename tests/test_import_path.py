"""Where a process of a run imports modules from, which ``import slime`` settles."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slime.config.process import import_environment, module_command

CHECKOUT = str(Path(__file__).resolve().parents[1])


def imports(words: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": CHECKOUT, **variables}
    command = [sys.executable, "-P", "-c", words]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def test_modules_of_the_working_directory_come_after_all_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if Ray has put the working directory first."""
    for name in ("statistics", "numpy", "own"):
        (tmp_path / f"{name}.py").write_text("")
    monkeypatch.chdir(tmp_path)
    words = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import slime\n"
        "import statistics, numpy, own; print(statistics.mean([1]), numpy.arange(1), own.__file__)"
    )
    ran = imports(words, tmp_path, **import_environment())
    assert ran.stdout == f"1 [0] {tmp_path}/own.py\n", ran.stderr


def test_a_working_directory_that_the_user_puts_first_stays_there(tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text("mine = True")
    path = os.pathsep.join([str(tmp_path), CHECKOUT])
    ran = imports(
        "import slime, numpy; print(numpy.mine)",
        tmp_path,
        PYTHONPATH=path,
        SLIME_WORKING_DIRECTORY=str(tmp_path),
    )
    assert ran.stdout == "True\n", ran.stderr


@pytest.mark.parametrize("file", ["random.py", "queue.py", "json/__init__.py"])
def test_a_file_that_hides_a_module_of_python_is_named_at_once(file: str, tmp_path: Path) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("")
    ran = imports("import slime", tmp_path, PYTHONPATH=os.pathsep.join([str(tmp_path), CHECKOUT]))
    last = ran.stderr.splitlines()[-1]
    assert ran.returncode == 1 and last.startswith("ImportError: ") and "rename it" in last
    assert str(tmp_path / file).removesuffix("/__init__.py") in last


def test_other_files_and_folders_are_left_alone(tmp_path: Path) -> None:
    for folder in ("random", "test", "site-packages"):
        (tmp_path / folder).mkdir()
    (tmp_path / "test" / "__init__.py").write_text("")
    (tmp_path / "queue.json").write_text("")
    (tmp_path / "site-packages" / "dataclasses.py").write_text("")
    path = os.pathsep.join(
        [str(tmp_path), str(tmp_path / "absent"), str(tmp_path / "site-packages"), CHECKOUT]
    )
    ran = imports("import slime", tmp_path, PYTHONPATH=path)
    assert ran.returncode == 0, ran.stderr


def test_modules_of_slime_run_without_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "random.py").write_text("raise RuntimeError")
    command = [*module_command("slime.engines.guard"), "--help"]
    ran = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, **import_environment()},
        check=False,
        text=True,
        capture_output=True,
    )
    assert ran.returncode == 0, ran.stderr
