"""A user's own estimator: what is wrong with its class is said before a run starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from slime.config.algorithm import create_algorithm, loading_problem, trial_problem
from tests.make_args import make_args

BASE = "from slime.algorithms.grpo import Grpo\n\n\nclass Mine(Grpo):\n"


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        (
            "from slime.algorithms import Algorithm\nclass Mine(Algorithm):\n    pass\n",
            "advantages",
        ),
        ("class Mine:\n    pass\n", "slime.algorithms.Algorithm"),
        ("def Mine(rewards):\n    return rewards\n", "a function"),
        ("class Other:\n    pass\n", "has no 'Mine'"),
        ("1 / 0\n", "ZeroDivisionError"),
        (BASE + "    def group_baseline(self):\n        return []\n", "group_baseline"),
    ],
)
def test_a_class_that_cannot_serve_is_named(code: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(code)
    found = loading_problem(f"{tmp_path}/mine.py:Mine")
    assert found is not None and found.startswith("--advantage-estimator") and problem in found


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("return rewards[:1]", "per reward"),
        ("return [1 / r for r in rewards]", "ZeroDivisionError"),
    ],
)
def test_a_baseline_that_fails_on_a_small_group_is_named(
    body: str, problem: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(
        f"{BASE}    def group_baseline(self, rewards):\n        {body}\n"
    )
    args = make_args(advantage_estimator=f"{tmp_path}/mine.py:Mine")
    found = trial_problem(args.advantage_estimator, lambda: create_algorithm(args))
    assert found is not None and problem in found


def test_the_registry_imports_nothing_heavy() -> None:
    code = (
        "import sys, slime.config.algorithm; print({'torch', 'numpy', 'ray', 'transformers'} & "
        "set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
