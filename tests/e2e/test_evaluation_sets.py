"""Two real data sets evaluated in a run, each with settings, reward and generate function of its
own.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(600)]

HOOKS = """
from slime.rollout.sglang_rollout import generate


async def cautious(args, sample, sampling_params, evaluation=False):
    assert evaluation and sampling_params["temperature"] == 0.5
    sample = await generate(args, sample, sampling_params)
    sample.metadata["cautious"] = True
    return sample


async def judge(args, sample, **kwargs):
    return {"score": 0.75 if sample.index % 2 else 0.25, "cautious": sample.metadata["cautious"]}


async def run_reward(args, sample, **kwargs):
    raise AssertionError("the data sets have rewards of their own")
"""


def test_two_data_sets_with_overrides(runner, flags, datasets_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(HOOKS)
    config = {
        "defaults": {"n_samples_per_eval_prompt": 3, "max_response_len": 6, "max_prompt_len": 420, "temperature": 1.0},
        "datasets": [
            {
                "name": "gsm8k", "path": f"{datasets_dir}/gsm8k/test.jsonl@[:5]", "rm_type": "math",
                "input_key": "question", "label_key": "answer", "n_samples_per_eval_prompt": 4,
            },
            {
                "name": "math500", "path": f"{datasets_dir}/math500/math500.jsonl@[:4]", "input_key": "problem",
                "label_key": "answer", "temperature": 0.5, "max_response_len": 5,
                "custom_generate_function_path": f"{tmp_path}/mine.py:cautious",
                "custom_rm_path": f"{tmp_path}/mine.py:judge",
            },
        ],
    }  # fmt: skip
    (tmp_path / "eval.yaml").write_text(yaml.safe_dump({"eval": config}))
    result = runner.inline(
        *flags, "--custom-rm-path", f"{tmp_path}/mine.py:run_reward", "--eval-config", tmp_path / "eval.yaml",
        "--eval-reward-key", "score", "--eval-interval", 1, "--num-rollout", 0,
    )  # fmt: skip
    assert result.code == 0, result.output
    record = json.loads((result.folder / "eval" / "eval_000000.json").read_text())
    sets = record["datasets"]
    assert list(sets) == ["gsm8k", "math500"]
    assert {len(row) for row in sets["gsm8k"]["rewards"]} == {4} and {
        len(r) for r in sets["math500"]["rewards"]
    } == {3}
    assert (
        sets["math500"]["settings"]["temperature"] == 0.5
        and sets["gsm8k"]["settings"]["temperature"] == 1.0
    )

    row = result.metrics("eval/step")[0]
    # a random model knows no sums
    assert row["eval/gsm8k"] == 0.0 and row["eval/gsm8k-pass@4"] == 0.0
    flat = [reward for rewards in sets["math500"]["rewards"] for reward in rewards]
    assert set(flat) == {0.25, 0.75}
    assert row["eval/math500"] == pytest.approx(sum(flat) / len(flat)) == row["eval/math500-mean@3"]
    passed = [sum(reward > 0.5 for reward in rewards) for rewards in sets["math500"]["rewards"]]
    assert row["eval/math500-pass@1"] == pytest.approx(sum(passed) / len(flat))
    assert row["eval/math500-pass@3"] == 1.0 and "eval/math500-pass@4" not in row
    assert row["eval/math500/response_len/max"] <= 5 < row["eval/gsm8k/response_len/max"] <= 6

    assert list((result.folder / "tensorboard").glob("events*"))
    table = [
        line.split()
        for line in result.output.splitlines()
        if line.strip().startswith(("gsm8k ", "math500 "))
    ]
    assert [words[0] for words in table[:2]] == ["gsm8k", "math500"] and table[1][
        1
    ] == f"{row['eval/math500']:.3f}"
    texts = (result.folder / "samples" / "eval-math500_000000.jsonl").read_text().splitlines()
    assert all(json.loads(text)["metadata"]["cautious"] for text in texts)
    assert runner.wait_gone() == []
