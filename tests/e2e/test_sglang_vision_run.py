"""The geo3k example of several turns, with real SGLang on the CPU: images from the rows to engine
and trainer.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
from example_scripts import EXAMPLES
from figure_samples import geometry, save_model

pytestmark = [pytest.mark.sglang, pytest.mark.real, pytest.mark.timeout(1300)]


@pytest.mark.parametrize(
    "architecture", ["qwen2_5_vl", pytest.param("qwen3_vl", marks=pytest.mark.long)]
)
def test_the_second_look_with_real_sglang(runner, architecture: str, tmp_path: Path) -> None:
    model = save_model(architecture, tmp_path / "model", warm_up_steps=12)  # some answers are right
    look, data = EXAMPLES / "geo3k_vlm_multi_turn", tmp_path / "geometry"
    train, held_out = (
        geometry.write_rows(data, name, n, seed=1) for name, n in (("train", 16), ("eval", 4))
    )
    result = runner.run(
        "--hf-checkpoint", model, "--prompt-data", train, "--multimodal-keys", '{"image": "images"}',
        "--custom-generate-function-path", f"{look / 'second_look.py'}:generate", "--max-turns", 2,
        "--custom-rm-path", f"{look / 'second_look.py'}:score", "--rm-type", "last_number",
        "--custom-config-path", look / "answer.yaml", "--rollout-batch-size", 4, "--n-samples-per-prompt", 4,
        "--rollout-max-response-len", 64, "--num-rollout", 3, "--lr", "3e-4", "--train-backend", "fsdp",
        "--eval-interval", 3, "--eval-prompt-data", "figures", held_out, "--log-multi-turn",
        "--rollout-backend", "sglang", "--sglang-device", "cpu", "--sglang-max-total-tokens", 8192,
        env={"PYTHONPATH": os.environ["PYTHONPATH"]}, timeout=900,  # with torchvision
    )  # fmt: skip
    assert result.code == 0, result.output
    rows = result.metrics()
    assert len(rows) == 3
    trained = [row for row in rows if row["train/grad_norm"] > 0]
    assert trained and all(row["train/train_rollout_logprob_abs_diff"] < 1e-4 for row in trained)
    for row in rows:
        assert row["perf/audit_logprob_diff"] < 1e-3 and row["rollout/http_retry_count"] == 0
    assert "its log-probs belong to other tokens" not in result.output
    assert runner.wait_gone() == []
