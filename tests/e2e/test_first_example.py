"""The first reward of the customization guide, as it is printed there, in whole runs with a real
model.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

GUIDE = Path(__file__).resolve().parents[2] / "docs/en/get_started/customization.md"
WORDS = ("Paris", "Rome")
SYSTEM = "Repeat the word of the user. Write nothing else."

pytestmark = [pytest.mark.real, pytest.mark.timeout(1300)]


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param(["embedded"], marks=pytest.mark.slow),
        pytest.param(
            ["sglang", "--sglang-device", "cpu", "--sglang-max-total-tokens", 4096],
            marks=[pytest.mark.sglang, pytest.mark.long],
        ),
    ],
    ids=lambda engine: engine[0],
)
def test_a_right_answer_is_paid(
    runner, smollm2: Path, tmp_path: Path, engine: list[object]
) -> None:
    (tmp_path / "rewards.py").write_text(
        re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)[0]
    )
    rows = []
    for word in WORDS:
        shown = [{"role": "user", "content": "Berlin"}, {"role": "assistant", "content": "Berlin"}]
        prompt = [{"role": "system", "content": SYSTEM}, *shown, {"role": "user", "content": word}]
        rows.append(json.dumps({"prompt": prompt, "label": word}))
    (tmp_path / "words.jsonl").write_text("\n".join(rows))
    result = runner.inline(
        "--hf-checkpoint", smollm2, "--prompt-data", "words.jsonl", "--apply-chat-template",
        "--custom-rm-path", "rewards.py:score", "--rollout-batch-size", 2, "--n-samples-per-prompt", 4,
        "--rollout-max-response-len", 8, "--rollout-temperature", 0.2, "--num-rollout", 1, "--train-backend", "fsdp",
        "--rollout-backend", *engine,
    )  # fmt: skip
    assert result.code == 0, result.output
    lines = [
        json.loads(line)
        for file in (result.folder / "samples").glob("*.jsonl")
        for line in file.open()
    ]
    samples = [line for line in lines if "response" in line]
    assert len(samples) == 8
    for sample in samples:
        assert "<|im_end|>" not in sample["response"]
        assert sample["reward"] == (
            sample["response"].strip() in WORDS and sample["response"].strip() == sample["label"]
        )
    assert sum(sample["reward"] for sample in samples) >= 4, "the model repeats most words"
