"""A real model on repositories with a bug, through the real generate path to the end of a step."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "examples"))

from example_scripts import load_example

from slime.plugins.agents.box import LIMITS, LocalBox
from slime.plugins.agents.sandbox import SandboxUnavailable


@pytest.mark.long  # test_whole_examples.py runs the script of the example with a tiny model
@pytest.mark.slow
@pytest.mark.real
@pytest.mark.timeout(600)
def test_smollm2_works_on_repositories_to_the_end_of_a_step(
    runner, smollm2: Path, tmp_path: Path
) -> None:
    try:
        LocalBox(LIMITS, ["/app"])
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    make_tasks = load_example("software_task/make_tasks.py")
    for repository in make_tasks.REPOSITORIES[:2]:
        make_tasks.write(tmp_path / "tasks", repository)
    result = runner.inline(
        "--hf-checkpoint", smollm2, "--environment", f"harbor:{tmp_path / 'tasks'}?seconds=10",
        "--max-turns", 2, "--rollout-batch-size", 2, "--n-samples-per-prompt", 2,
        "--rollout-max-response-len", 48, "--num-rollout", 1, "--lr", "1e-5",
        "--train-backend", "fsdp", "--rollout-backend", "embedded", "--max-tokens-per-gpu", 2048,
    )  # fmt: skip
    assert result.code == 0, result.output
    lines = (result.folder / "metrics.jsonl").read_text().splitlines()
    rewards = [
        line["rollout/raw_reward"]
        for line in map(json.loads, lines)
        if "rollout/raw_reward" in line
    ]
    assert rewards and 0 <= rewards[0] <= 1, "a repository that is left as it is passes some tests"
