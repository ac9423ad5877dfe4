"""Functions of a program in the processes of a run: by value, from any folder, and with what they refer to."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

from slime.api.shipping import forget, pack, ship
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
        "from pathlib import Path\nfrom helpers import double\nfrom slime.api.shipping import pack, ship\n"
        "def quadruple(x):\n    return double(double(x))\n"
        f"folder = Path({str(tmp_path)!r})\nprint(ship(quadruple, 'quadruple', folder))\nassert not pack(folder)\n"
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

    ship(locked, "locked", tmp_path)
    (problem,) = pack(tmp_path)
    assert problem.startswith("locked: it cannot be sent to the processes of the run: it uses guard (a lock)")
    assert not list(tmp_path.glob("*.pkl"))


def test_in_the_same_process_it_is_the_function_itself(tmp_path: Path) -> None:
    """So what it changes is seen by the program, and it may use what cannot be pickled."""
    seen: list[int] = []
    guard = threading.Lock()

    def noted(x: int) -> None:
        with guard:
            seen.append(x)

    load_function(ship(noted, "noted", tmp_path))(5)
    assert seen == [5]
    forget(tmp_path)
