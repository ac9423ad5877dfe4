"""DPO, KTO and a reward model through the real command, to their effect; the reward model's folder scores
as a reward.
"""

from __future__ import annotations

import json

import pytest

pytestmark = [pytest.mark.real, pytest.mark.timeout(280)]


@pytest.fixture
def pairs(tmp_path):
    rows = [
        {
            "prompt": [{"role": "user", "content": f"say {i}"}],
            "chosen": f"yes {i}",
            "rejected": f"no {i}",
        }
        for i in range(16)
    ]
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def common(tiny_model, pairs, loss):
    return (
        *("--loss-type", loss, "--hf-checkpoint", tiny_model, "--prompt-data", pairs),
        *("--debug-train-only", "--rollout-batch-size", 8, "--num-rollout", 6, "--lr", "1e-3"),
        *("--train-backend", "fsdp", "--train-dtype", "float32", "--rollout-shuffle"),
    )


def test_dpo_learns_to_prefer(runner, tiny_model, pairs):
    result = runner.inline(*common(tiny_model, pairs, "dpo"))
    assert result.code == 0, result.output
    steps = result.metrics()
    assert steps[0]["train/loss"] == pytest.approx(0.693147, abs=1e-4), (
        "policy and reference are equal"
    )
    assert steps[-1]["train/loss"] < 0.3 and steps[-1]["train/preference_accuracy"] == 1.0
    assert steps[-1]["train/chosen_reward"] > 0 > steps[-1]["train/rejected_reward"]
    assert "accuracy 100%" in result.output and "rollout/raw_reward" not in steps[-1]


def test_kto_learns_what_is_desirable(runner, tiny_model, pairs):
    result = runner.inline(*common(tiny_model, pairs, "kto"), "--kto-beta", "0.5")
    assert result.code == 0, result.output
    steps = result.metrics("train/loss")
    assert steps[0]["train/loss"] == pytest.approx(0.5, abs=1e-4), "policy and reference are equal"
    assert steps[-1]["train/loss"] < 0.3
    assert steps[-1]["train/chosen_reward"] > 0 > steps[-1]["train/rejected_reward"]
    assert all(row["train/kto_reference_point"] >= 0 for row in steps)


async def test_a_reward_model_scores_as_it_was_trained(runner, tiny_model, pairs, tmp_path):
    from slime.data.sample import Sample
    from slime.rollout.rm_hub import async_rm
    from slime.rollout.rm_hub.dispatch import check_rewards
    from tests.make_args import make_args

    export = tmp_path / "export_{rollout_id}"
    result = runner.inline(
        *common(tiny_model, pairs, "reward_model"),
        *("--rollout-batch-size", 16, "--num-rollout", 9),
        *("--save-hf", export, "--save", tmp_path / "save", "--save-interval", 8),
    )
    assert result.code == 0, result.output
    steps = result.metrics()
    assert steps[8]["train/loss"] < 0.4 < steps[0]["train/loss"]
    assert steps[8]["train/preference_accuracy"] == 1.0
    # The last step measured all pairs with the weights of the export, before it changed them.
    folder = str(export).format(rollout_id=7)
    args = make_args(rm_type="model", rm_model_path=folder, hf_checkpoint=str(tiny_model))
    assert check_rewards(args) == []
    margins = []
    for i in range(16):
        samples = [
            Sample(prompt=[{"role": "user", "content": f"say {i}"}], response=f"{word} {i}")
            for word in ("yes", "no")
        ]
        chosen, rejected = [await async_rm(args, sample) for sample in samples]
        margins.append(chosen - rejected)
    measured = steps[8]["train/preference_margin"]
    assert sum(margins) / 16 == pytest.approx(measured, rel=1e-4)
    other = args.with_values(rm_model_path=str(tiny_model))
    assert "sequence classifier" in check_rewards(other)[0]
