"""On-policy distillation with the teacher in the trainer, against transformers' own forward."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fsdp_helpers import make_args, make_backend, make_samples, save_tiny_llama, whole_batch
from transformers import AutoModelForCausalLM

from slime.backends.train_loop import train_on_rollout


def log_probs_of(checkpoint: Path, tokens: torch.Tensor, response: int) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float64, attn_implementation="eager"
    )
    with torch.no_grad():
        log_p = model(tokens[None]).logits[0].log_softmax(-1)[-response - 1 : -1]
    return log_p.gather(-1, tokens[-response:, None]).squeeze(-1)


def test_the_teacher_scores_and_the_student_moves_towards_it(tmp_path: Path) -> None:
    student, teacher = (
        save_tiny_llama(tmp_path / "student", 0),
        save_tiny_llama(tmp_path / "teacher", 1),
    )
    args = make_args(
        student,
        use_opd=True,
        opd_type="megatron",
        opd_teacher_load=str(teacher),
        opd_kl_coef=0.5,
        lr=1e-3,
        clip_grad=0.0,
    )
    backend = make_backend(args)
    gaps = []
    for _ in range(3):  # on the same samples the gradient is that of the squared gap
        batch = whole_batch(make_samples())
        batch["rewards"] = [0.0] * len(batch["rewards"])
        metrics, seconds = train_on_rollout(backend, batch)
        assert "teacher_log_probs" in seconds
        gaps.append(float(torch.cat(batch["opd_reverse_kl"]).square().mean()))
        if len(gaps) == 1:
            for i, (tokens, n) in enumerate(
                zip(batch["tokens"], batch["response_lengths"], strict=True)
            ):
                gap = log_probs_of(student, tokens, n) - log_probs_of(teacher, tokens, n)
                expected = -0.5 * gap * batch["loss_masks"][i]
                torch.testing.assert_close(
                    batch["advantages"][i].double(), expected, rtol=1e-4, atol=1e-4
                )
            assert metrics["train/opd_reverse_kl"] == pytest.approx(
                metrics["rollout/opd_reverse_kl"], rel=1e-5
            )
    assert gaps[2] < gaps[1] < gaps[0]
