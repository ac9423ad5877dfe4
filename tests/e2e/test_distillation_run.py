"""Distillation through the real command: towards a teacher, and from the model itself with the label
in its prompt, where a resumed run goes on exactly.
"""

from __future__ import annotations

import json

import pytest

pytestmark = [pytest.mark.real, pytest.mark.timeout(280)]


def test_it_learns_what_the_teacher_does(runner, flags, save_tiny, tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=258,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
        initializer_range=0.2,
    )
    teacher = save_tiny(LlamaForCausalLM, config)
    result = runner.inline(
        *(*flags, "--loss-type", "distill", "--distill-teacher", teacher),
        *("--lr", "3e-3", "--num-rollout", 6),
    )
    assert result.code == 0, result.output
    losses = [row["train/loss"] for row in result.metrics("train/loss")]
    assert losses[-1] < 0.8 * losses[0]


def test_a_teacher_that_follows_is_resumed_exactly(runner, flags, prompts, tmp_path):
    rows = [json.loads(line) for line in prompts.read_text().splitlines()]
    assert all(row["label"] for row in rows)
    common = [*flags, "--loss-type", "distill", "--distill-context", "label"]
    common = [word for word in common if word != "--apply-chat-template"]
    common += ["--distill-ema", "0.5", "--lr", "1e-3", "--deterministic", "--num-rollout", 4]
    whole = runner.inline(*common, name="whole")
    assert whole.code == 0, whole.output
    save = ("--save", tmp_path / "save", "--save-interval", 2)
    first = runner.inline(*common, "--num-rollout", 2, *save, name="first")
    assert first.code == 0, first.output
    rest = runner.inline(*common, "--load", tmp_path / "save", name="rest")
    assert rest.code == 0, rest.output
    steps, resumed = (
        {row["rollout/step"]: row["train/loss"] for row in run.metrics("train/loss")}
        for run in (whole, rest)
    )
    assert resumed == {step: steps[step] for step in (1, 2, 3)}
    assert all(loss > 0 for loss in steps.values())
