"""Functions of a program in the processes of a run: by value, from any folder, and with what they refer to."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from slime.api.shipping import NotShippable, ship
from slime.config.hooks import load_function

LOCK = threading.Lock()


def test_a_closure_and_a_lambda_keep_what_they_refer_to(tmp_path: Path) -> None:
    bonus = 3
    for name, function in {"sum_up": lambda x: x + bonus, "named": _made(bonus)}.items():
        path = ship(function, name, tmp_path)
        assert path == f"{tmp_path / name}.py:{name}"
        assert load_function(path)(4) == 7


def _made(bonus: int):  # type: ignore[no-untyped-def]
    def named(x: int) -> int:
        return x + bonus

    return named


def test_a_function_of_a_program_reaches_another_process(tmp_path: Path) -> None:
    """Of the program itself, and of a module that only the program's import path has."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "helpers.py").write_text("def double(x):\n    return 2 * x\n")
    program = (
        f"import sys; sys.path.append({str(tmp_path / 'lib')!r})\n"
        "from pathlib import Path\nfrom helpers import double\nfrom slime.api.shipping import ship\n"
        "def quadruple(x):\n    return double(double(x))\n"
        f"print(ship(quadruple, 'quadruple', Path({str(tmp_path)!r})))\n"
    )
    (tmp_path / "program.py").write_text(program)
    path = _said(str(tmp_path / "program.py"))
    code = f"from slime.config.hooks import load_function; print(load_function({path!r})(5))"
    assert _said("-c", code) == "20"


def _said(*words: str) -> str:
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=120, check=True
    ).stdout.strip()


def test_what_cannot_be_sent_is_named(tmp_path: Path) -> None:
    guard = threading.Lock()

    def locked(x: int) -> int:
        with guard:
            return x

    with pytest.raises(NotShippable, match=r"it uses guard \(a lock\).*create such objects inside the function"):
        ship(locked, "locked", tmp_path)
    assert not list(tmp_path.iterdir())
