"""The command line with which a run goes on after its manager or a rank has died."""

from __future__ import annotations

import pytest

from slime.cluster.restart import command_line

VALUES = {"max_restarts": 3, "save": "outputs/run/checkpoints", "run_name": "run", "output_dir": "outputs"}
ENDING = ["--max-restarts", "2", "--run-name", "run", "--output-dir", "outputs"]


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (["train.py", "--lr", "1e-3"], ["train.py", "--lr", "1e-3"]),
        (["train.py", "--load", "hf", "--ckpt-step", "3", "--lr", "1"], ["train.py", "--load", "hf", "--lr", "1"]),
        (["train.py", "--ckpt-step=3", "--finetune", "--lr", "1"], ["train.py", "--lr", "1"]),
        (["-u", "train.py", "--start-rollout-id", "0"], ["-u", "train.py"]),
    ],
)
def test_it_goes_on_from_its_own_snapshot(words: list[str], kept: list[str]) -> None:
    assert command_line(words, VALUES, saved=True) == [*kept, *ENDING, "--load", VALUES["save"]]


def test_without_a_snapshot_it_begins_where_it_began() -> None:
    words = ["train.py", "--load", "other", "--ckpt-step", "3"]
    assert command_line(words, VALUES, saved=False) == [*words, *ENDING]
