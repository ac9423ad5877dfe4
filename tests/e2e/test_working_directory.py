"""Files in the working directory that are named like modules of Python, or of the packages that a
run imports.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Runner

pytestmark = [pytest.mark.real, pytest.mark.slow]
NAMES = ("random", "types", "queue", "logging", "statistics", "code", "ray", "torch")


def test_files_named_like_modules_of_python_do_not_disturb_a_run(
    runner: Runner, flags: list[object], tmp_path: Path
) -> None:
    """The reward is a module of the working directory, and imports a neighbour of its own when it
    is called.
    """
    for name in NAMES:
        (tmp_path / name).mkdir() if name in ("ray", "torch") else None
        file = (
            tmp_path / name / "__init__.py" if name in ("ray", "torch") else tmp_path / f"{name}.py"
        )
        file.write_text("raise RuntimeError('a file of the working directory was imported')\n")
    (tmp_path / "neighbour.py").write_text("def count(text):\n    return float(len(text))\n")
    (tmp_path / "own_reward.py").write_text(
        "async def reward(args, sample, **kwargs):\n"
        "    from neighbour import count\n"
        "    return count(sample.response)\n"
    )
    ran = runner.run(*flags, "--num-rollout", 1, "--custom-rm-path", "own_reward.reward")
    assert ran.code == 0, ran.output
    assert ran.metrics()[0]["rollout/raw_reward"] > 0
