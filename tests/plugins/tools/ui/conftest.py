"""``run`` is the folder of a real run of four asynchronous steps, with dumps, a filter and two
evaluations.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime.plugins.tools.ui.runs import Run, Runs

FOLDER = Path(__file__).parent / "tiny"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(FOLDER, tmp_path / "outputs" / "tiny"))


@pytest.fixture
def runs(folder: Path, tmp_path: Path) -> Iterator[Runs]:
    made = Runs([folder.parent], tmp_path / "cache")
    made.refresh()
    yield made
    made.close()


@pytest.fixture
def run(runs: Runs) -> Run:
    found = runs.get("tiny")
    assert found is not None
    return found
