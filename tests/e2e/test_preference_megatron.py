"""Losses of judged responses with real megatron-core on the CPU, two ranks: they are those of FSDP,
and so is the exported reward model.
"""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from tests.e2e.test_train_megatron import on_cpu

pytestmark = [pytest.mark.megatron, pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("loss", "layout"),
    [
        ("dpo", ["--tensor-model-parallel-size", 2]),
        pytest.param("reward_model", ["--pipeline-model-parallel-size", 2], marks=pytest.mark.long),
        pytest.param("kto", [], marks=pytest.mark.long),
    ],
)
def test_losses_are_those_of_fsdp(runner, tiny_model, tmp_path, loss, layout):
    rows = [{"prompt": f"say {i}", "chosen": f"yes {i}", "rejected": "no"} for i in range(16)]
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = [
        *("--loss-type", loss, "--hf-checkpoint", tiny_model, "--prompt-data", pairs),
        *("--debug-train-only", "--rollout-batch-size", 8, "--num-rollout", 3, "--lr", "1e-3"),
        *("--train-dtype", "float32", "--save-interval", 3),
    ]
    exports = tmp_path / "one", tmp_path / "two"
    one = runner.inline(*common, "--train-backend", "fsdp", "--save-hf", exports[0], name="fsdp")
    assert one.code == 0, one.output
    two = runner.run(
        *common, "--actor-num-gpus-per-node", 2, *layout, *on_cpu(compiled=loss == "dpo"), "--save-hf", exports[1],
        name="megatron", timeout=300,
    )  # fmt: skip
    assert two.code == 0, two.output
    ours, theirs = ([row["train/loss"] for row in run.metrics("train/loss")] for run in (two, one))
    assert len(ours) == 3 and ours[-1] < ours[0]
    assert ours == pytest.approx(theirs, abs=2e-5)
    if loss == "reward_model":
        tokens = torch.tensor([[3, 5, 7, 11]])
        models = [AutoModelForSequenceClassification.from_pretrained(path) for path in exports]
        scores = [model(tokens).logits.item() for model in models]
        assert scores[1] == pytest.approx(scores[0], abs=1e-3) and scores[0] != 0
    assert runner.wait_gone() == []
