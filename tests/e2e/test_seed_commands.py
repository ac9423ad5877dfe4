"""The seeds' launch commands, typed as they stand; only ``--override`` scales them to this machine."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

QUICK_START = """
--actor-num-nodes 1 --actor-num-gpus-per-node 4 --rollout-num-gpus 4 --advantage-estimator grpo
--use-kl-loss --kl-loss-coef 0.001 --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256
--num-rollout 3000 --prompt-data {data}
"""
GRPO = """
--actor-num-nodes 1 --actor-num-gpus-per-node 8 --rollout-num-gpus 8 --advantage-estimator grpo --use-kl-loss
--kl-loss-coef 0.001 --prompt-data {data} --input-key prompt --label-key label --apply-chat-template
--rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256 --num-rollout 3000 --save-interval 100
--eval-interval 50
"""
ASYNC = """
--actor-num-nodes 1 --actor-num-gpus-per-node 8 --rollout-num-gpus 8 --advantage-estimator grpo
--async-buffer-size 4 --prompt-data {data}
"""
COLOCATE = "--colocate --actor-num-gpus-per-node 8 --sglang-mem-fraction-static 0.4 --prompt-data {data}"

SCALE = """
actor_num_gpus_per_node: 1
rollout_num_gpus: 1
rollout_batch_size: 4
n_samples_per_prompt: 2
global_batch_size: 8
num_rollout: 2
rollout_max_response_len: 8
"""


@pytest.fixture
def override(tmp_path: Path) -> Path:
    file = tmp_path / "laptop.yaml"
    file.write_text(SCALE)
    return file


@pytest.mark.parametrize(
    ("command", "script"),
    [(QUICK_START, "train.py"), (GRPO, "train.py"), (ASYNC, "train_async.py"), (COLOCATE, "train.py")],
    ids=["quick-start", "grpo", "async", "colocate"],
)
def test_typed_as_it_stands(runner, tiny_model, prompts, override, command: str, script: str) -> None:
    """MODEL_ARGS and CKPT_ARGS of the seeds carry the checkpoint here as there."""
    result = runner.run(
        *shlex.split(command.format(data=prompts)), "--hf-checkpoint", tiny_model, "--override", override, script=script
    )
    assert result.code == 0, result.output
    steps = result.metrics()
    assert len(steps) == 2
    if "--eval-interval" in command:
        assert "--eval-prompt-data" in result.output  # the one warning that says what is missing
    if "--save-interval" in command:
        assert (result.folder / "checkpoints" / "latest_checkpointed_iteration.txt").read_text().strip() == "1"


def test_eight_gpus_on_a_laptop_are_explained_in_one_line(runner, tiny_model, prompts) -> None:
    result = runner.run(*shlex.split(GRPO.format(data=prompts)), "--hf-checkpoint", tiny_model, timeout=60)
    assert result.code == 2, result.output
    lines = [line for line in result.output.splitlines() if "--actor-num-gpus-per-node" in line]
    assert len(lines) == 1 and "8" in lines[0], result.output
