"""Fixtures of the environments: the scripted engine of the examples' tests, and a tokenizer of
bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path[:0] = [str(Path(__file__).parents[3] / "examples"), str(Path(__file__).parent)]

from scripted_engine import Script, byte_tokenizer  # noqa: E402

from slime.data.sample import Sample  # noqa: E402
from slime.plugins.agents.environments.base import own_seed  # noqa: E402
from slime.plugins.agents.environments.rollout import generate  # noqa: E402
from slime.plugins.agents.environments.source import task_sample  # noqa: E402


@pytest.fixture(scope="session")
def bytes_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_tokenizer(tmp_path_factory.mktemp("bytes"))


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch, bytes_dir: Path) -> Callable[..., Any]:
    """``await play(spec, texts, number=0, **flags)``: one episode in which the model says these
    texts.
    """

    async def run(
        spec: str, says: list[str], number: int = 0, **flags: Any
    ) -> tuple[Sample, Script]:
        script = Script(monkeypatch, bytes_dir, environment=spec, **flags)
        script.says = [text if text.endswith("ABORT") else f"{text}<eos>" for text in says]
        sample = task_sample(own_seed(spec, 42), number)
        sample.index = sample.group_index = 0
        return await generate(script.args, sample, script.params), script

    return run
