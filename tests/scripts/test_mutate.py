"""The table of planted mistakes applies to today's code, and ``tools/mutate.py`` tells which of
them the tests find.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
TOOL = CHECKOUT / "tools" / "mutate.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutate", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_every_mutant_applies_once_is_python_and_has_tests(tool: ModuleType) -> None:
    mutants = tool.read_table()
    stale = [str(one) for one in mutants if one.is_stale]
    assert not stale, "tools/mutants.txt: the text must be exactly once in the file:\n" + "\n".join(
        stale
    )
    assert len(mutants) == len({(one.file, one.old, one.new) for one in mutants}) >= 150

    @functools.cache
    def parsed(text: str) -> str:
        return ast.dump(ast.parse(text))

    for one in mutants:
        text = (CHECKOUT / one.file).read_text()
        assert one.old != one.new
        assert parsed(text.replace(one.old, one.new)) != parsed(text), one
        assert all((CHECKOUT / tests).exists() for tests in one.tests), one


@pytest.mark.real
def test_what_is_killed_what_survives_and_where_a_second_call_goes_on(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    files = {
        "slime/__init__.py": "",
        "slime/data/__init__.py": "",
        "slime/data/a.py": "def double(x):\n    return 2 * x\n\n\ndef half(x):\n    return x / 2\n",
        "tests/data/test_a.py": "from slime.data.a import double\n"
        "\n"
        "\n"
        "def test_double():\n"
        "    assert double(2) == 4\n",
        "slime/data/b.py": "ONE = 1\n",
        "tests/data/test_b.py": "from slime.data import b\n"
        "\n"
        "\n"
        "def test_one():\n"
        "    assert b.ONE == 2\n",
        "tools/mutants.txt": "# a comment\n"
        "slime/data/a.py\n"
        "    2 * x ==> 3 * x\n"
        "    x / 2 ==> x / 3\n"
        "    y ==> z\n"
        "\n"
        "slime/data/b.py\n"
        "    ONE = 1 ==> ONE = 3\n",
        "pyproject.toml": "[tool.pytest.ini_options]\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    shutil.copy(TOOL, tmp_path / "tools")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    # These tests need none of the packages that the tool imports for those of slime.
    stand_ins = tmp_path_factory.mktemp("stand_ins")
    for package in (
        "torch/_dynamo",
        "torch/distributed/fsdp",
        "transformers/generation",
        "aiohttp",
    ):
        (stand_ins / package).mkdir(parents=True)
        (stand_ins / package.partition("/")[0] / "__init__.py").touch()

    environment = os.environ | {"PYTHONPATH": str(stand_ins)}

    def call(*words: str) -> tuple[int, list[str]]:
        command = [sys.executable, "tools/mutate.py", "--jobs", "2", *words]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        return done.returncode, done.stdout.split("\nfile")[-1].splitlines()

    # However many are judged in no time, the call ends, and the next one goes on.
    assert call("--minutes", "0")[0] == 1
    assert (tmp_path / "outputs" / "mutants.jsonl").read_text()
    status, table = call()
    results = (tmp_path / "outputs" / "mutants.jsonl").read_text()
    assert status == 1
    assert [line.split()[0] for line in table[-4:]] == ["survived", "stale", "broken", "25.0%"]
    assert len(results.splitlines()) == 3
    assert {name: (tmp_path / name).read_text() for name in files} == files
    assert call() == (status, table)
    assert (tmp_path / "outputs" / "mutants.jsonl").read_text() == results
    # A new test makes the mutant of its file unknown again, and only these.
    more = "\n\ndef test_half():\n    from slime.data.a import half\n\n    assert half(3) == 1.5\n"
    (tmp_path / "tests/data/test_a.py").write_text(files["tests/data/test_a.py"] + more)
    assert [line.split()[0] for line in call()[1][-3:]] == ["stale", "broken", "50.0%"]
    assert len((tmp_path / "outputs" / "mutants.jsonl").read_text().splitlines()) == 5
