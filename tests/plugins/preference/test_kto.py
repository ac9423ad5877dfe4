"""KTO by numbers worked by hand, its rows, its mismatched responses, and its reference point."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.backends.base import TrainNeeds
from slime.backends.loss import compute_loss, divide_by_weights
from slime.backends.loss_inputs import LossSettings, TokenBatch
from slime.config.args import Args
from slime.data.rows import DataError
from slime.data.sample import flatten
from slime.plugins.preference import REFERENCE_POINT, check
from slime.plugins.preference.losses import WEIGHT_KEY, kto_loss, set_reference_point
from slime.plugins.preference.rows import PreferenceSource, generate_rollout
from tests.make_args import make_args
from tests.rollout.rollout_parts import make_tokenizer


def kto_args(**more: Any) -> Args:
    return make_args(loss_type="kto", train_backend="fsdp", **more)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_the_loss_by_hand() -> None:
    # r = 2, -1 ; z = 0.5 ; β = 0.5: 1.5 (1 - σ(0.75)) and 0.5 (1 - σ(0.75))
    losses = kto_loss(
        torch.tensor([2.0, -1.0]), torch.tensor([1.5, -0.5]), torch.tensor([0.5, 0.5]), 0.5
    )
    assert losses.tolist() == pytest.approx([1.5 * 0.320821, 0.5 * 0.320821], abs=1e-6)


def test_a_batch_by_hand() -> None:
    # A desirable response of two tokens, an undesirable one of one token, and a mismatched one.
    tokens = TokenBatch(
        response_lengths=[2, 1, 2],
        total_lengths=[3, 2, 3],
        loss_mask=torch.tensor([1, 1, 1, 0, 0]),
        rollout_mask_sums=torch.tensor([2.0, 1.0, 1.0]),
        log_probs=torch.tensor([-1.0, -2.0, -3.0, math.nan, -9.0], requires_grad=True),
        ref_log_probs=torch.tensor([-2.0, -2.0, -1.0, 0.0, 0.0]),
        advantages=torch.full((5,), 0.25),
        returns=torch.tensor([1.0, 1.0, -2.0, 0.0, 0.0]),
    )
    settings = LossSettings.from_args(kto_args(kto_beta=0.5))
    loss, metrics = compute_loss(settings, tokens, num_rollouts=2, num_tokens=3)
    good, bad = sigmoid(-0.5 * (1 - 0.25)), sigmoid(0.5 * (-2 - 0.25))
    assert loss.item() == pytest.approx((good + 2 * bad) / 2)
    found = divide_by_weights({name: float(x) for name, x in metrics.items()})
    expected = {"chosen_reward": 0.5, "rejected_reward": -1.0, "kto_reference_point": 0.25}
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    (gradient,) = torch.autograd.grad(loss, [tokens.log_probs])
    first, last = -0.5 * good * (1 - good) / 2, 0.5 * 2 * bad * (1 - bad) / 2
    assert gradient.tolist() == pytest.approx([first, first, last, 0, 0])


@pytest.mark.parametrize(("gap", "point"), [(0.5, 0.875), (-3.0, 0.0)])
def test_the_reference_point_is_that_of_mismatched_responses(gap: float, point: float) -> None:
    batch: dict[str, Any] = {
        "metadata": [{WEIGHT_KEY: w} for w in (1.0, 0.0, -0.5, 0.0)],
        "response_lengths": [2, 2, 1, 1],
        "log_probs": [torch.full((n,), 7.0 if n == 1 else gap) for n in (2, 2, 1, 1)],
        "ref_log_probs": [torch.zeros(2), torch.zeros(2), torch.zeros(1), torch.full((1,), 6.25)],
    }
    # (2 gap + 0.75) / 2
    set_reference_point(kto_args(), batch)
    assert [x.tolist() for x in batch["advantages"]] == [[point] * n for n in (2, 2, 1, 1)]
    assert [x[0].item() for x in batch["returns"]] == [1.0, 0.0, -0.5, 0.0]


def test_what_it_sets_and_refuses() -> None:
    args = kto_args()
    needs = TrainNeeds.from_args(args)
    assert needs.ref_log_probs and needs.trains and needs.old_log_probs
    assert args.custom_advantage_function_path == REFERENCE_POINT and check(args) == []
    for name, value in (
        ("normalize_advantages", True),
        ("compute_advantages_and_returns", False),
        ("custom_advantage_function_path", "mine.py:f"),
    ):
        (problem,) = check(args.with_values(**{name: value}))
        assert "reference point" in problem


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def rolled(tmp_path: Path, tokenizer: Path, rows: list[dict[str, Any]], **more: Any) -> list[Any]:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    args = kto_args(
        prompt_data=str(file),
        hf_checkpoint=str(tokenizer),
        rollout_batch_size=len(rows),
        kto_undesirable_weight=0.5,
        **more,
    )
    groups = generate_rollout(args, 0, PreferenceSource(args)).samples
    return [flatten(rollout) for (rollout,) in groups]


def test_rows_and_their_mismatched_responses(tmp_path: Path, tokenizer: Path) -> None:
    rows = [
        {"prompt": "2+2=", "completion": "4", "label": True},
        {"prompt": "2+3=", "completion": "7!", "label": False},
        {"prompt": "2+4=", "chosen": "6", "rejected": "8!?"},
    ]
    good, bad, pair = rolled(tmp_path, tokenizer, rows)
    weights = [[s.train_metadata[WEIGHT_KEY] for s in part] for part in (good, bad, pair)]
    assert weights == [[1.0, 0.0], [-0.5, 0.0], [0.5, -0.25, 0.0, 0.0]]
    # Each prompt with the response before: those of the rows are 4, 7!, 6, 8!?
    assert good[1].response == pair[1].response and bad[1].response == good[0].response
    assert [s.response for s in pair[2:]] == [bad[0].response, pair[0].response]
    for real, other, source in ((good[0], good[1], pair[1]), (bad[0], bad[1], good[0])):
        prompt = real.tokens[: -real.response_length]
        assert other.tokens == prompt + source.tokens[-source.response_length :]
        assert other.loss_mask == [0] * other.response_length and real.loss_mask is None


def test_other_columns_and_wrong_labels(tmp_path: Path, tokenizer: Path) -> None:
    rows = [{"prompt": "2+2=", "said": "4", "good": True}] * 2
    ((real, _), _) = rolled(tmp_path, tokenizer, rows, completion_column="said", label_key="good")
    assert real.response.startswith("4") and real.reward == 1.0
    with pytest.raises(DataError, match="desirable: true or false, not 'yes'"):
        rolled(tmp_path, tokenizer, [{"prompt": "2+2=", "completion": "4", "label": "yes"}])
    turn = [{"role": "assistant", "content": "4"}]
    with pytest.raises(DataError, match="prompt is a text, but its completion has messages"):
        rolled(tmp_path, tokenizer, [{"prompt": "2+2=", "completion": turn, "label": True}])
