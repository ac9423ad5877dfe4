"""What is taken from inside of a step: the parts of the loss, and gradients."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

sys.path.append(str(Path(__file__).resolve().parents[3] / "backends"))

from fsdp_helpers import (
    make_args,
    make_backend,
    make_samples,
    save_tiny_llama,
    weights_of,
    whole_batch,
)

from slime.backends.fsdp.backend import FsdpBackend
from slime.backends.train_loop import train_on_rollout
from slime.data.fields import RankBatch
from slime.plugins.tools.replay import capture
from slime.plugins.tools.replay.capture import InLoss


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("model"))


def backend_of(model: Path, **flags: object) -> FsdpBackend:
    return make_backend(make_args(model, **flags))


def test_the_samples_add_up_to_the_loss_and_looking_changes_nothing(model: Path) -> None:
    plain = backend_of(model, eps_clip=0.2, use_kl_loss=True, kl_loss_coef=0.1)
    straight, _ = train_on_rollout(plain, whole_batch(make_samples()))
    total = 0.0
    for position in range(16):
        backend = backend_of(model, eps_clip=0.2, use_kl_loss=True, kl_loss_coef=0.1)
        parts: list[InLoss] = []
        with capture.losses_of(backend, [position], parts):
            metrics, _ = train_on_rollout(backend, whole_batch(make_samples()))
        assert {k: v for k, v in metrics.items() if "perf" not in k} == {
            k: v for k, v in straight.items() if "perf" not in k
        }
        (part,) = parts
        total += part.loss
    assert total == pytest.approx(straight["train/loss"], rel=1e-5)
    after, looked_at = weights_of(plain), weights_of(backend)
    assert all(torch.equal(after[name], looked_at[name]) for name in after)


def test_the_gradient_of_a_token_is_its_advantage_divided_by_what_the_loss_divides_by(
    model: Path,
) -> None:
    backend, parts, batch = backend_of(model), [], whole_batch(make_samples())
    with capture.losses_of(backend, [1], parts):
        train_on_rollout(backend, batch)
    facts = capture.facts_of(batch, 1)
    mask, advantages = facts.per_token["loss_masks"], facts.per_token["advantages"]
    # With one step and no recomputed log-probs the ratio is 1, so that dloss/dlogp = -advantage ·
    # mask / (tokens · 16).
    torch.testing.assert_close(parts[0].gradient, -advantages * mask / mask.sum() / 16)
    assert parts[0].gradient[0] == 0, "the first token of this sample is masked"
    assert facts.numbers["sample_indices"] == 1 and len(facts.tokens) > facts.response_length
    assert capture.position_of(batch, 1) == 1 and capture.position_of(batch, 99) is None


def test_gradients_are_those_that_the_optimizer_gets(model: Path) -> None:
    backend, found = backend_of(model), []
    with capture.gradients_of(backend, found):
        metrics, _ = train_on_rollout(backend, whole_batch(make_samples(), steps=2))
    assert len(found) == 2
    norms = [torch.sqrt(sum((g.double() ** 2).sum() for g in grads.values())) for grads in found]
    assert float(sum(norms)) / 2 == pytest.approx(metrics["train/grad_norm"], rel=1e-5)


def test_the_tensors_of_a_batch_have_the_index_of_their_sample(model: Path) -> None:
    backend, batch = backend_of(model), whole_batch(make_samples())
    train_on_rollout(backend, batch)
    found = capture.tensors_of_batch(batch)
    assert torch.equal(found["5.tokens"], batch["tokens"][5]) and "5.advantages" in found


def shares_of(backend: FsdpBackend, batch: RankBatch) -> list[tuple[int, float]]:
    """Train on the 16 samples of ``batch``, and return each one's influence, by its index."""
    parts: list[InLoss] = []
    shares: list[tuple[int, float]] = []
    with (
        capture.losses_of(backend, range(16), parts),
        capture.influences_of(
            backend, lambda: backend.log_probs(batch)["log_probs"], parts, shares
        ),
    ):
        train_on_rollout(backend, batch)
    return shares


def test_the_influence_of_a_sample_is_its_gradient_along_that_of_the_step(model: Path) -> None:
    flags = {"eps_clip": 0.2, "use_kl_loss": True, "kl_loss_coef": 0.1}
    plain = backend_of(model, **flags)
    train_on_rollout(plain, whole_batch(make_samples()))
    backend, batch = backend_of(model, **flags), whole_batch(make_samples())
    shares = shares_of(backend, batch)
    after, looked_at = weights_of(plain), weights_of(backend)
    assert all(torch.equal(after[name], looked_at[name]) for name in after)
    found = {one.index: one.share for one in capture.influences(batch, shares)}
    assert sum(found.values()) == pytest.approx(1, abs=1e-3)

    # The same by one backward pass for each sample.
    whole, alone = gradient_of(model, flags, None), {}
    for position in range(16):
        alone[position] = gradient_of(model, flags, position)
    square = float(whole @ whole)
    exact = {position: float(one @ whole) / square for position, one in alone.items()}
    assert max(abs(found[position] - share) for position, share in exact.items()) < 1e-3
    assert max(exact.values()) > 10 * min(exact.values())


def test_influences_add_up_where_log_probs_are_far_from_linear(model: Path, tmp_path: Path) -> None:
    sharp = shutil.copytree(model, tmp_path / "sharp")
    weights = load_file(sharp / "model.safetensors")
    save_file(
        {name: 3 * tensor for name, tensor in weights.items()},
        sharp / "model.safetensors",
        metadata={"format": "pt"},
    )
    backend, batch = backend_of(sharp), whole_batch(make_samples())
    shares = shares_of(backend, batch)
    assert sum(share for _, share in shares) == pytest.approx(1, abs=1e-2)


def gradient_of(model: Path, flags: dict[str, object], sample: int | None) -> torch.Tensor:
    """The gradient of the step, or of the share of one sample: the step in which the advantages
    and the KL coefficient of all others are 0."""
    backend, grads, batch = backend_of(model, **flags), [], whole_batch(make_samples())
    original = backend.share_of_loss

    def only(batch, indices, step, scores, targets, own):
        if sample is not None:
            keep = torch.cat(
                [
                    torch.full((int(batch["response_lengths"][i]),), float(i == sample))
                    for i in indices
                ]
            )
            kept = scores.log_probs * keep + scores.log_probs.detach() * (1 - keep)
            scores = scores._replace(log_probs=kept)
        return original(batch, indices, step, scores, targets, own)

    backend.share_of_loss = only
    with capture.gradients_of(backend, grads):
        train_on_rollout(backend, batch)
    return torch.cat([g.double().flatten() for g in grads[0].values()])
