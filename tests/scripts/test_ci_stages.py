"""Every test is run by a stage of CI or of the long circle, and the quick suite leaves out what has
a stage of its own.
"""

from __future__ import annotations

import ast
import functools
import itertools
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression
from hypothesis import given
from hypothesis import strategies as st

CHECKOUT = Path(__file__).resolve().parents[2]

OUTSIDE = {"cuda"}
"""What CI has no machine for."""

OF_THE_LONG_CIRCLE = {"long", "more", "given"}
"""What the stages with ``SLIME_TESTS=long`` run (tests/conftest.py); ``given`` is hypothesis's."""

compiled = functools.cache(Expression.compile)


@dataclass(frozen=True)
class Stage:
    """One call of a test script: which marks it selects, the files that it is limited to or
    ignores, and whether it runs what each commit leaves out.
    """

    marks: str
    only: tuple[str, ...]
    ignored: tuple[str, ...]
    long: bool

    def runs(self, file: str, marks: frozenset[str]) -> bool:
        wanted = not self.only or file.startswith(self.only)
        return (
            wanted
            and file not in self.ignored
            and bool(marks & OF_THE_LONG_CIRCLE if self.long else "long" not in marks)
            and compiled(self.marks).evaluate(lambda m: m in marks)
        )


def marks_of_script(name: str) -> str:
    """The ``-m`` expression that the script, called without arguments, gives to pytest."""
    text = (CHECKOUT / "scripts" / name).read_text(encoding="utf-8")
    if default := re.search(r"""^ +set -- .*-m "([^"]+)"$""", text, re.MULTILINE):
        return default[1]
    found = re.search(
        r"""^exec .*?(?:-m pytest|test\.sh") -m (?:"([^"]+)"|(\w+))""", text, re.MULTILINE
    )
    assert found, f"{name} gives pytest no -m"
    return found[1] or found[2]


def stages(file: str, long: bool) -> list[Stage]:
    found = []
    for line in (CHECKOUT / file).read_text(encoding="utf-8").splitlines():
        if line.startswith("#") or long != ("SLIME_TESTS=long" in line):
            continue
        if call := re.search(r"bash scripts/(test\w*\.sh)([^>&]*)", line):
            own, arguments = marks_of_script(call[1]), shlex.split(call[2])
            ignored = tuple(b for a, b in itertools.pairwise(arguments) if a == "--ignore")
            marks = [b for a, b in itertools.pairwise(arguments) if a == "-m"]
            only = tuple(
                word if word.endswith(".py") else f"{word}/"
                for word in arguments
                if word.startswith("tests/") and word not in ignored
            )
            found.append(Stage((marks or [own])[-1], only, ignored, long))
    return found


STAGES = stages(".ci/run", long=False)
LONG_STAGES = stages("scripts/test_all.sh", long=True)


def marks_in(nodes: list[ast.expr]) -> frozenset[str]:
    texts = [ast.unparse(node) for node in nodes]
    return frozenset(re.findall(r"pytest\.mark\.(\w+)", " ".join(texts))) | frozenset(
        "given" for text in texts if text.startswith("given(")
    )


def _marked_tests() -> Iterator[tuple[str, str, frozenset[str]]]:
    """File, name and marks of each test function; one with marked parameters appears with and
    without their marks.
    """
    for path in sorted(CHECKOUT.glob("tests/**/test_*.py")):
        file, tree = str(path.relative_to(CHECKOUT)), ast.parse(path.read_text(encoding="utf-8"))
        of_file = marks_in([node.value for node in tree.body if isinstance(node, ast.Assign)
                            and ast.unparse(node.targets[0]) == "pytestmark"])  # fmt: skip
        for node in ast.walk(tree):
            if not isinstance(
                node, ast.FunctionDef | ast.AsyncFunctionDef
            ) or not node.name.startswith("test_"):
                continue
            parametrized = [
                d
                for d in node.decorator_list
                if ast.unparse(d).startswith("pytest.mark.parametrize")
            ]
            own = of_file | marks_in([d for d in node.decorator_list if d not in parametrized])
            yield file, node.name, own
            parameters = " ".join(map(ast.unparse, parametrized))
            if of_parameters := frozenset(re.findall(r"marks=.*?pytest\.mark\.(\w+)", parameters)):
                yield file, node.name, own | of_parameters


@functools.cache
def marked_tests() -> list[tuple[str, str, frozenset[str]]]:
    return list(_marked_tests())


def test_each_test_is_run_by_a_stage() -> None:
    """Of CI, unless it is marked ``long``, and what each commit leaves out by one of the long
    circle.
    """
    assert len(STAGES) >= 4 and len(LONG_STAGES) >= 4
    forgotten = [
        f"{file}::{name} {sorted(marks)}"
        for file, name, marks in marked_tests()
        for stages_of_it, chosen in (
            (STAGES, "long" not in marks),
            (LONG_STAGES, marks & OF_THE_LONG_CIRCLE),
        )
        if chosen
        and not marks & OUTSIDE
        and not any(stage.runs(file, marks) for stage in stages_of_it)
    ]
    assert forgotten == []


def test_each_mark_is_declared_and_run_by_a_stage() -> None:
    settings = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["tool"][
        "pytest"
    ]["ini_options"]
    # tests/engines/conftest.py
    declared = {line.partition(":")[0] for line in settings["markers"]} | {"capability"}
    tests = marked_tests()
    used = frozenset[str]().union(*(marks for _, _, marks in tests))
    by_plugins = {
        "parametrize",
        "skipif",
        "filterwarnings",
        "usefixtures",
        "timeout",
        "asyncio",
        "xfail",
        "skip",
        "given",
    }
    assert used - by_plugins <= declared
    run = {
        mark
        for file, _, marks in tests
        if any(stage.runs(file, marks) for stage in (*STAGES, *LONG_STAGES))
        for mark in marks
    }
    assert used - OUTSIDE <= run


def test_the_quick_suite_starts_no_engine_and_no_ray() -> None:
    """README promises minutes."""
    (quick,) = [stage for stage in STAGES if stage.marks == marks_of_script("test.sh")]
    assert [
        name for file, name, marks in marked_tests() if "real" in marks and quick.runs(file, marks)
    ] == []


@pytest.mark.parametrize("stage", [*STAGES, *LONG_STAGES], ids=str)
def test_each_stage_has_tests(stage: Stage) -> None:
    assert any(stage.runs(file, marks) for file, _, marks in marked_tests())


def run_pytest(*arguments: str, code: int = 0, **environment: str) -> str:
    """Run pytest in a process of its own, and return what it prints."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(
        command, cwd=CHECKOUT, env=os.environ | environment, capture_output=True, text=True
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


@pytest.mark.real
def test_what_each_commit_leaves_out_is_run_by_the_long_circle_alone() -> None:
    file = "tests/scripts/test_ci_stages.py"
    marked = ("test_long", "test_more", "test_of_hypothesis")
    chosen = [f"{file}::{name}" for name in (*marked, "test_no_two_test_files_have_one_name")]
    assert "3 passed, 1 deselected" in run_pytest(*chosen, SLIME_TESTS="")
    assert "3 passed, 1 deselected" in run_pytest(*chosen, SLIME_TESTS="long")


@pytest.mark.long
def test_long() -> None:
    """What the test above looks for, like the next two."""


@pytest.mark.more
def test_more() -> None:
    pass


@given(st.just(0))
def test_of_hypothesis(_: int) -> None:
    pass


@pytest.mark.real
def test_the_tests_of_a_file_run_in_one_process() -> None:
    """They share fixtures that take long to make: two processes would make each of them twice."""
    files = ("tests/config/test_overrides.py", "tests/config/test_secrets.py")
    printed = run_pytest(*files, "-vv", "-n", "2", "--dist", "loadfile")
    ran = set(re.findall(r"\[(gw\d)\].* PASSED (\S+?)::", printed))
    assert sorted(file for _, file in ran) == sorted(files), "each file in one process"
    assert len({process for process, _ in ran}) == 2


@pytest.mark.parametrize("folder", ["tests/weights", "tests/cluster"])
def test_processes_of_a_folder_are_those_of_its_files(tmp_path: Path, folder: str) -> None:
    """Also where none of its files has to come first."""
    script = tmp_path / "scripts" / "test_processes.sh"
    script.parent.mkdir()
    script.write_text((CHECKOUT / "scripts" / script.name).read_text(encoding="utf-8"))
    (script.parent / "test.sh").write_text('printf "%s\\n" "$@"\n')
    (tmp_path / "tests").symlink_to(CHECKOUT / "tests")
    for more in ({}, {"SLIME_TESTS": "long"}):
        said = subprocess.run(
            ["bash", script, folder], env=os.environ | more, capture_output=True, text=True
        )
        files = [word for word in said.stdout.splitlines() if word.endswith(".py")]
        assert files and all(file.startswith(f"{folder}/") for file in files), said


def test_no_two_test_files_have_one_name() -> None:
    """pytest imports them by their names, and refuses the second one when both are collected."""
    names = [file.name for file in CHECKOUT.glob("tests/**/test_*.py")]
    assert len(names) == len(set(names)), sorted({name for name in names if names.count(name) > 1})


def test_what_a_change_can_break() -> None:
    from affected import affected_tests

    views = affected_tests(["slime/plugins/tools/ui/views.py"])
    assert (
        "tests/plugins/tools/ui/test_site.py" in views
        and "tests/algorithms/test_estimators.py" not in views
    )
    ratios = affected_tests(["slime/algorithms/off_policy.py"])
    assert {"tests/algorithms/test_reference_numbers.py", "tests/backends/test_loss.py"} <= set(
        ratios
    )
    assert "tests/plugins/tools/ui/test_site.py" not in ratios
    assert affected_tests(["tests/plugins/tools/ui/test_site.py"]) == [
        "tests/plugins/tools/ui/test_site.py"
    ]
    assert {test.split("/")[1] for test in affected_tests(["docs/en/plan.md"])} == {"docs"}
    assert len(affected_tests(["tests/conftest.py"])) == len(
        list(CHECKOUT.glob("tests/**/test_*.py"))
    )
    assert affected_tests(["LICENSE"]) == []
