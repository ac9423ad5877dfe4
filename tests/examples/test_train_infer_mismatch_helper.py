"""The correction of one's own, through slime's loss hook, and the table of the runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from example_scripts import CHECKOUT, EXAMPLES, load_example
from hypothesis import given
from hypothesis import strategies as st
from make_args import make_args

from slime.config.args import FLAGS, Args
from slime.config.hooks import load_function

correction = load_example("train_infer_mismatch_helper/correction.py")
FOLDER = EXAMPLES / "train_infer_mismatch_helper"


def limits(**given: float) -> Args:
    """Args with the keys of a settings file."""
    args = make_args()
    for name, value in given.items():
        setattr(args, name, value)
    return args


def gate(args: Args, gaps: list[list[float]], masks: list[list[int]] | None = None):
    ours = [torch.tensor(gap) - 1.0 for gap in gaps]
    engines = [torch.full((len(gap),), -1.0) for gap in gaps]
    loss_masks = (
        [torch.ones(len(gap), dtype=torch.int) for gap in gaps]
        if masks is None
        else list(map(torch.tensor, masks))
    )
    pg_loss = torch.ones(sum(map(len, gaps)), requires_grad=True)
    loss, new, metrics = correction.sequence_gate(
        args=args, pg_loss=pg_loss, train_log_probs=ours, rollout_log_probs=engines, loss_masks=loss_masks,
        total_lengths=[9] * len(gaps), response_lengths=list(map(len, gaps)),
    )  # fmt: skip
    return loss, [mask.tolist() for mask in new], metrics


def test_an_answer_that_is_read_differently_is_left_out_and_the_rest_weighed() -> None:
    args = limits(sequence_gap_limit=0.5, sequence_weight_limit=1.2)
    loss, masks, metrics = gate(args, [[0.1, -0.1], [2.0, 0.0, 0.0], [0.5, 0.5]])
    assert masks == [[1, 1], [0, 0, 0], [1, 1]], "mean gaps are 0.1, 0.67 and 0.5"
    torch.testing.assert_close(loss[:2], torch.tensor([0.1, -0.1]).exp())
    torch.testing.assert_close(loss[5:], torch.tensor([1.2, 1.2])), "exp(0.5) is bounded"
    torch.testing.assert_close(metrics["gate_gap"][2:5], torch.full((3,), 2 / 3))
    assert metrics["gate_dropped_frac"].tolist() == [0, 0, 1, 1, 1, 0, 0]


def test_tokens_that_are_not_trained_do_not_count() -> None:
    """Tool output has no log-probs of the engine: whatever stands there changes nothing."""
    args = limits(sequence_gap_limit=0.05)
    loss, masks, _ = gate(args, [[0.0, 50.0, float("-inf")]], [[1, 0, 0]])
    assert masks == [[1, 0, 0]] and loss.tolist() == [1.0, 1.0, 1.0]
    loss, masks, _ = gate(args, [[50.0]], [[0]])
    assert masks == [[0]] and loss.tolist() == [1.0]


@given(
    st.lists(st.lists(st.floats(-3, 3, width=32), min_size=1, max_size=6), min_size=1, max_size=5)
)
def test_weights_stay_in_their_bounds_and_whole_answers_go(gaps: list[list[float]]) -> None:
    loss, masks, metrics = gate(limits(), gaps)
    assert all(len(set(mask)) == 1 for mask in masks)
    assert loss.min() > 0 and loss.max() <= correction.MAX_WEIGHT
    assert all(len(value) == sum(map(len, gaps)) for value in metrics.values())


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.yaml")), ids=lambda file: file.stem)
def test_the_files_name_flags_and_functions_that_exist(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key that is no flag becomes an attribute of args, so a slip of the pen would go
    unnoticed.
    """
    settings = yaml.safe_load(file.read_text())
    monkeypatch.chdir(CHECKOUT)
    path = settings.get("custom_tis_function_path")
    assert path is None or callable(load_function(path))
    mis = (CHECKOUT / "slime" / "algorithms" / "mis.py").read_text()
    own = (FOLDER / "correction.py").read_text()
    assert all(key in FLAGS or f'"{key}"' in mis or f'"{key}"' in own for key in settings)


def test_the_table_has_a_row_for_each_run_and_step(tmp_path: Path) -> None:
    table = load_example("train_infer_mismatch_helper/table.py")
    for name, metrics in (("measure", {"train/mis_weight": 1.0}), ("tis", {"train/tis": 0.5})):
        (tmp_path / f"mismatch_{name}").mkdir()
        row = {"rollout/step": 0, "train/loss": 0.25, **metrics}
        (tmp_path / f"mismatch_{name}" / "metrics.jsonl").write_text(
            f"{json.dumps(row)}\n{json.dumps({'eval/x': 1})}\n"
        )
    assert table.rows(tmp_path, ["measure", "tis"]) == [
        ["measure", "0", "-", "-", "1.00000", "-", "-", "0.25000", "-"],
        ["tis", "0", "-", "-", "0.50000", "-", "-", "0.25000", "-"],
    ]
