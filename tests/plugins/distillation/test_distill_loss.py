"""Training with a teacher beside transformers' own forwards in float64: one teacher, several, of other
shapes, with another prompt, and one that follows the student.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from slime.backends.fsdp.backend import FsdpBackend
from slime.backends.train_loop import train_on_rollout
from slime.config.args import Args
from slime.data.fields import RankBatch
from slime.plugins.distillation import DIVERGENCES
from slime.plugins.distillation.divergence import distilled
from slime.plugins.distillation.teachers import TEACHER_PROMPT
from tests.backends.fsdp_helpers import (
    make_args,
    make_backend,
    make_samples,
    save_tiny_llama,
    save_tiny_qwen3,
    weights_of,
    whole_batch,
)


def logits_of(model: AutoModelForCausalLM, tokens: torch.Tensor, response: int) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens[None]).logits[0, -response - 1 : -1]


def read(folder: Path) -> AutoModelForCausalLM:
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager"
    )


def divergences(
    student: Path, teacher: Path, batch: RankBatch, prompts: list[list[int]] | None = None
) -> list[torch.Tensor]:
    """KL(student ‖ teacher) at each response token of each sample, by the models alone."""
    ours, theirs = read(student), read(teacher)
    found = []
    for i, (tokens, n) in enumerate(zip(batch["tokens"], batch["response_lengths"], strict=True)):
        seen = tokens
        if prompts is not None:
            seen = torch.cat([torch.tensor(prompts[i]), tokens[-n:]])
        pair = logits_of(ours, tokens, n), logits_of(theirs, seen, n)
        found.append(distilled(*pair, "reverse_kl"))
    return found


def mean_over(found: list[torch.Tensor], batch: RankBatch) -> float:
    """The mean over samples of the mean over their trained tokens."""
    masks = [mask.double() for mask in batch["loss_masks"]]
    means = [float((x * m).sum() / m.sum()) for x, m in zip(found, masks, strict=True)]
    return sum(means) / len(means)


def distill_args(student: Path, teacher: object, **more: Any) -> Args:
    settings = dict(loss_type="distill", compute_advantages_and_returns=False, clip_grad=0.0)
    return make_args(
        student, distill_teacher=None if teacher is None else str(teacher), **settings | more
    )


def step(backend: FsdpBackend, args: Args, **entries: Any) -> tuple[dict[str, float], RankBatch]:
    batch = whole_batch(make_samples())
    for name, value in entries.items():
        batch[name] = value
    return train_on_rollout(backend, batch)[0], batch


@pytest.mark.parametrize("save", [save_tiny_llama, save_tiny_qwen3])
def test_a_teacher_of_any_shape(save: Any, tmp_path: Path) -> None:
    student = save_tiny_llama(tmp_path / "student", 0)
    teacher = save(tmp_path / "teacher", 1, hidden_size=48, num_hidden_layers=3)
    args = distill_args(student, teacher, lr=1e-2)
    backend = make_backend(args)
    losses = []
    for _ in range(4):
        metrics, batch = step(backend, args)
        losses.append(metrics["train/loss"])
    expected = mean_over(divergences(student, teacher, batch), batch)
    assert losses[0] == pytest.approx(expected, rel=1e-5)
    assert losses[-1] < 0.8 * losses[0]
    assert 0 <= metrics["train/teacher_agreement"] <= 1
    # Logits that are scored in more or fewer micro-batches are the same loss.
    whole = whole_batch(make_samples(), micro_batch_size=16)
    assert train_on_rollout(make_backend(args), whole)[0]["train/loss"] == pytest.approx(
        losses[0], rel=1e-6
    )


def test_several_teachers_by_weight_and_by_data_set(tmp_path: Path) -> None:
    student, a, b, c = (save_tiny_llama(tmp_path / name, i) for i, name in enumerate("sabc"))
    file = tmp_path / "teachers.yaml"
    file.write_text(
        f"- {{name: a, path: {a}, weight: 3}}\n- {{name: b, path: {b}, weight: 1, sources: [x]}}\n"
        f"- {{name: c, path: {c}, weight: 4, sources: [y]}}\n"
    )
    args = distill_args(student, file)
    sources = ["x", "y"] * 8
    metrics, batch = step(make_backend(args), args, source_names=sources)
    by = {
        name: divergences(student, folder, batch)
        for name, folder in zip("abc", (a, b, c), strict=True)
    }
    mixed = [
        0.75 * by["a"][i] + 0.25 * by["b"][i]
        if source == "x"
        else (3 * by["a"][i] + 4 * by["c"][i]) / 7
        for i, source in enumerate(sources)
    ]
    assert metrics["train/loss"] == pytest.approx(mean_over(mixed, batch), rel=1e-5)
    file.write_text(f"- {{name: b, path: {b}, sources: [x]}}\n")
    with pytest.raises(ValueError, match="samples of the data set y"):
        step(make_backend(args), args, source_names=sources)


def test_a_teacher_that_reads_more(tmp_path: Path) -> None:
    student = save_tiny_llama(tmp_path / "student", 0)
    args = distill_args(student, None, distill_context="label")
    prompts = [[1 + i % 3, 7, 9, 11] for i in range(16)]
    metadata = [{TEACHER_PROMPT: prompt} for prompt in prompts]
    metrics, batch = step(make_backend(args), args, metadata=metadata)
    expected = mean_over(divergences(student, student, batch, prompts), batch)
    assert expected > 0.01
    assert metrics["train/loss"] == pytest.approx(expected, rel=1e-5)


def test_a_teacher_follows_the_student(tmp_path: Path) -> None:
    student = save_tiny_llama(tmp_path / "student", 0)
    args = distill_args(student, None, distill_context="label", distill_ema=0.75, lr=1e-2)
    backend = make_backend(args)
    metadata = [{TEACHER_PROMPT: [1, 7, 9]} for _ in range(16)]
    teacher = {name: x.double() for name, x in weights_of(backend).items()}
    for _ in range(3):
        step(backend, args, metadata=metadata)
        for name, x in weights_of(backend).items():
            teacher[name] = 0.75 * teacher[name] + 0.25 * x.double()
    (own,) = backend.loss_settings.registered.teachers
    for name, p in own.scorer.hf.named_parameters():
        torch.testing.assert_close(p.double(), teacher[name], rtol=0, atol=1e-6)
    # A snapshot has it: the next step of a run that continues is the same.
    backend.save(tmp_path / "snapshot")
    whole, _ = step(backend, args, metadata=metadata)
    other = make_backend(args)
    other.load(tmp_path / "snapshot")
    resumed, _ = step(other, args, metadata=metadata)
    assert resumed["train/loss"] == whole["train/loss"]
    assert resumed["train/grad_norm"] == whole["train/grad_norm"]


def test_the_flags_of_the_divergence(tmp_path: Path) -> None:
    student, teacher = (save_tiny_llama(tmp_path / name, i) for i, name in enumerate("st"))

    def loss(**flags: Any) -> float:
        args = distill_args(student, teacher, **flags)
        return step(make_backend(args), args)[0]["train/loss"]

    assert 0 < loss(distill_top_k=1) < loss(distill_top_k=8) < loss()
    assert len({loss(distill_divergence=kind) for kind in DIVERGENCES}) == 3
