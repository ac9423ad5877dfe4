"""Transcripts whose working is right, in rows that fine-tuning reads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from example_scripts import CHECKOUT, EXAMPLES, LAPTOP, dry_run, load_example, parse

from slime.data.sample import Sample
from slime.plugins.rewards.simple import last_number_reward
from slime.plugins.tools.commands.make_data import make_products

transcripts = load_example("sft_then_rl/transcripts.py")


def test_every_worked_answer_earns_the_reward(tmp_path: Path) -> None:
    for file in make_products(tmp_path):
        for line in file.read_text().splitlines():
            row = json.loads(line)
            *prompt, answer = transcripts.conversation(row)["messages"]
            assert prompt == row["prompt"] and answer["role"] == "assistant"
            assert last_number_reward(Sample(response=answer["content"], label=row["label"])) == 1.0
    assert (
        transcripts.worked(4, 3) == "4 times 3 = 4 + 4 + 4 = 12"
        and transcripts.worked(1, 7) == "1 times 7 = 7"
    )


def test_the_script_writes_one_conversation_a_product(tmp_path: Path) -> None:
    train, _ = make_products(tmp_path)
    script = EXAMPLES / "sft_then_rl" / "transcripts.py"
    command = [sys.executable, str(script), str(train), str(tmp_path / "out.jsonl")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=True, cwd=CHECKOUT
    )
    assert (
        len(Path(done.stdout.strip()).read_text().splitlines())
        == len(train.read_text().splitlines())
        == 65
    )


def test_rl_begins_where_fine_tuning_ended(tmp_path: Path, monkeypatch) -> None:
    sft, rl = (
        parse(c, LAPTOP, monkeypatch)
        for c in dry_run(EXAMPLES / "sft_then_rl" / "run_cpu.sh", tmp_path)
    )
    assert (
        sft.loss_type == "sft_loss"
        and sft.n_samples_per_prompt == 1
        and sft.num_rollout % sft.save_interval == 0
    )
    assert rl.load == sft.save and rl.finetune and rl.loss_type == "policy_loss"
