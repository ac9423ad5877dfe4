"""Every family of docs/en/models.md: packs against one sequence at a time in transformers, or
refused with the reason."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from every_family import PAD, VOCAB
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from slime.data.packing import MIN_SHARED_TOKENS
from slime.models.inputs import InputBuilder
from slime.models.loading import backbone_of, load_hf_model, one_layer_of_each_kind
from slime.models.packed_attention import NAME
from slime.models.packed_layers import prepare_packing
from slime.models.scorer import PolicyScorer, check_scorer

CPU = torch.device("cpu")


def samples() -> tuple[list[Tensor], list[int], list[int]]:
    """Tokens, response lengths and groups: two groups with shared prompts, a sample alone, one of
    two tokens, and the branches of an agent's session, two levels deep."""
    generator = torch.Generator().manual_seed(3)
    tokens, responses, groups = [], [], []
    for group, (prompt, own) in enumerate([(9, [6, 1, 17]), (3, [2, 8]), (12, [5]), (1, [1])]):
        start = torch.randint(0, VOCAB, (prompt,), generator=generator)
        start[0] = PAD
        for length in own:
            tokens.append(
                torch.cat([start, torch.randint(0, VOCAB, (length,), generator=generator)])
            )
            responses.append(length)
            groups.append(group)
    prompt, first, second, *ends = (
        torch.randint(0, VOCAB, (n,), generator=generator)
        for n in (5, MIN_SHARED_TOKENS, MIN_SHARED_TOKENS, 4, 2, 3)
    )
    for turns in ([first, ends[0]], [first, second, ends[1]], [first, second, ends[2]]):
        tokens.append(torch.cat([prompt, *turns]))
        responses.append(len(tokens[-1]) - len(prompt))
        groups.append(4)
    return tokens, responses, groups


def gradients(scorer: PolicyScorer) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in scorer.named_parameters() if p.grad is not None}
    scorer.zero_grad()
    return found


def loss_of(log_probs: Tensor, first: int) -> Tensor:
    """A loss with another weight for each token."""
    weights = torch.cos(torch.arange(first, first + len(log_probs)).float())
    return (log_probs * weights).sum()


@functools.lru_cache(maxsize=1)  # packs and padded batches of a model are compared with it
def one_at_a_time(folder: Path, count: int | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """The log-probs and gradients of each of the first ``count`` samples alone, with the attention
    of transformers.
    """
    model = load_hf_model(folder, torch.float32, "cpu", "eager")
    scorer = PolicyScorer(model)
    tokens, responses, _ = samples()
    parts: list[Tensor] = []
    for sample, response in list(zip(tokens, responses, strict=True))[:count]:
        logits = model(input_ids=sample[None], use_cache=False).logits[0]
        log_p = logits[len(sample) - response - 1 : -1].log_softmax(-1)
        mine = log_p.gather(-1, sample[len(sample) - response :, None]).squeeze(-1)
        loss_of(mine, sum(map(len, parts))).backward()
        parts.append(mine.detach())
    return torch.cat(parts), gradients(scorer)


def assert_same(
    scorer: PolicyScorer, builder: InputBuilder, want: tuple[Tensor, dict[str, Tensor]]
) -> None:
    inputs = builder.build(*samples(), [None] * 10)
    log_probs = scorer(inputs)[0].log_probs
    loss_of(log_probs, 0).backward()
    assert float((log_probs - want[0]).detach().abs().max()) < 1e-5
    got = gradients(scorer)
    assert_same_gradients(got, want[1])


def assert_same_gradients(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    for name, gradient in want.items():
        error = float((got[name] - gradient).norm())
        # The values of a decay are sums over all tokens in which much cancels: 3.1e-5 for
        # Qwen3.5-MoE.
        assert error <= 5e-5 * max(float(gradient.norm()), 0.2), name
    assert all(not gradient.any() for name, gradient in got.items() if name not in want)


def check_packed(folder: Path) -> None:
    """Packs with and without shared prompts, and with recomputed layers: log-probs, loss and
    gradients.

    Raises:
        ModelError: The model cannot be packed.
    """
    model = load_hf_model(folder, torch.float32, "cpu", NAME)
    stateful = prepare_packing(model)
    scorer = PolicyScorer(model)
    want = one_at_a_time(folder)
    for share in (False, True):
        builder = InputBuilder(backbone_of(model), CPU, share_prompts=share, stateful=stateful)
        assert check_scorer(scorer, builder) < 1e-5
        with one_layer_of_each_kind(model):
            assert check_scorer(scorer, builder) < 1e-5
        assert_same(scorer, builder, want)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for module in model.modules():
        module.training = isinstance(module, GradientCheckpointingLayer)
    assert_same(scorer, builder, want)


def check_padded(folder: Path, attention: str) -> None:
    """Log-probs and gradients of a padded batch with an attention of transformers."""
    model = load_hf_model(folder, torch.float32, "cpu", attention)
    assert_same(
        PolicyScorer(model),
        InputBuilder(backbone_of(model), CPU, packed=False),
        one_at_a_time(folder),
    )
