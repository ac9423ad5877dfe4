"""Tiny models, and engines that score with one fault each, for ``test_gap_causes.py``.

The faults are planted in the code of transformers or in its config, not by what the tool changes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from slime.plugins.gap.reference import GapSample, Reference, Sampling, Setup, load

VOCAB = 61


def samples_of(model: PreTrainedModel, seed: int = 3, count: int = 12) -> list[GapSample]:
    """Samples drawn from a model, whose scores are those of the model on both sides."""
    torch.manual_seed(seed)
    found = []
    for index in range(count):
        tokens = torch.randint(0, VOCAB, (1, 6))
        for _ in range(14 + index % 5):
            with torch.no_grad():
                probabilities = model(input_ids=tokens).logits[0, -1].softmax(-1)
            tokens = torch.cat([tokens, torch.multinomial(probabilities, 1)[None]], 1)
        length = tokens.shape[1] - 6
        mask = torch.ones(length, dtype=torch.bool)
        mask[0] = index % 3 > 0
        nothing = torch.zeros(length)
        stale = torch.zeros(length, dtype=torch.bool)
        found.append(GapSample(index, tokens[0], nothing, nothing, mask, stale))
    trained = scores(model, found)
    return [with_values(one, engine=t, trainer=t) for one, t in zip(found, trained, strict=True)]


def with_values(sample: GapSample, **values: object) -> GapSample:
    made = copy.copy(sample)
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made


@torch.no_grad()
def scores(model: PreTrainedModel, samples: Sequence[GapSample]) -> list[Tensor]:
    """Log-probs of the responses, ``[response_length]`` each."""
    found = []
    for one in samples:
        rows = model(input_ids=one.tokens[None]).logits[0].float().log_softmax(-1)
        chosen = rows[:-1].gather(1, one.tokens[1:, None])[:, 0]
        found.append(chosen[-len(one.mask) :])
    return found


def reference_of(model: PreTrainedModel, samples: Sequence[GapSample]) -> Reference:
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    return Reference(load(model, weights, torch.float32), Setup(weights, Sampling()), samples)


def engine_with(model: PreTrainedModel, tmp_path: Path, **config: object) -> PreTrainedModel:
    """The same weights with another config."""
    model.save_pretrained(tmp_path / "engine")
    return AutoModelForCausalLM.from_pretrained(
        tmp_path / "engine", dtype=torch.float32, **config
    ).eval()


def changed(model: PreTrainedModel, change: Callable[[str, Tensor], Tensor]) -> PreTrainedModel:
    """The model with other weights."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            parameter.copy_(change(name, parameter.clone()))
    return other


def fp8(_name: str, tensor: Tensor) -> Tensor:
    """8-bit floats with a scale for each 128 x 128 values; small tensors have one."""
    if not _name.endswith("_proj.weight"):
        return tensor
    found = torch.empty_like(tensor)
    for rows in range(0, tensor.shape[0], 128):
        for columns in range(0, tensor.shape[1], 128):
            block = tensor[rows : rows + 128, columns : columns + 128]
            scale = block.abs().max() / 448
            values = (block / scale).to(torch.float8_e4m3fn).float() * scale
            found[rows : rows + 128, columns : columns + 128] = values
    return found


@contextmanager
def fp8_inputs(model: PreTrainedModel) -> Iterator[None]:
    """8-bit inputs of the projections, with a scale for each 128 values of a token."""

    def rounded(_module: torch.nn.Module, inputs: tuple[Tensor]) -> Tensor:
        groups = inputs[0].unflatten(-1, (-1, 128))
        scales = groups.abs().amax(-1, keepdim=True) / 448
        return ((groups / scales).to(torch.float8_e4m3fn).float() * scales).flatten(-2)

    projections = [one for name, one in model.named_modules() if name.endswith("_proj")]
    hooks = [one.register_forward_pre_hook(rounded) for one in projections]
    yield
    for hook in hooks:
        hook.remove()


@contextmanager
def swapped_gate_and_up() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            LlamaMLP,
            "forward",
            lambda self, x: self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x)),
        )
        yield


@contextmanager
def flipped_routes(found: list[Tensor]) -> Iterator[None]:
    """Every fifth token goes to the expert after its second one; the choices are kept."""
    original = Qwen3MoeTopKRouter.forward

    def forward(self: Qwen3MoeTopKRouter, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, _, experts = original(self, hidden)
        third = logits.topk(3, -1).indices[:, 2]
        experts = experts.clone()
        experts[::5, 1] = third[::5]
        found.append(experts)
        return logits, logits.softmax(-1).gather(1, experts), experts

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Qwen3MoeTopKRouter, "forward", forward)
        yield


def nucleus_scores(
    model: PreTrainedModel, samples: Sequence[GapSample], top_p: float
) -> list[Tensor]:
    """Log-probs over the smallest set of tokens with at least ``top_p`` of the probability."""
    found = []
    for one in samples:
        with torch.no_grad():
            rows = model(input_ids=one.tokens[None]).logits[0, :-1].softmax(-1)
        values = []
        for row, target in zip(rows, one.tokens[1:].tolist(), strict=True):
            mass, kept = 0.0, []
            for token in row.argsort(descending=True).tolist():
                kept.append(token)
                mass += float(row[token])
                if mass >= top_p:
                    break
            inside = row[sorted({*kept, target})].sum()
            values.append(float((row[target] / inside).log()))
        found.append(torch.tensor(values)[-len(one.mask) :])
    return found
