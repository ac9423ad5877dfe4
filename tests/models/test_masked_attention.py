"""Attention to selected keys in blocks: what is computed does not depend on the blocks, and memory
grows with the tokens, not with their square."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from every_family import VOCAB, save_tiny
from family_checks import CPU, check_packed
from torch.utils._python_dispatch import TorchDispatchMode

from slime.models import masked_attention
from slime.models.inputs import InputBuilder
from slime.models.loading import backbone_of, load_hf_model
from slime.models.packed_attention import NAME
from slime.models.packed_layers import prepare_packing
from slime.models.scorer import PolicyScorer


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("GLM-5", {"num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"]}),
        ("DeepSeek V3.2", {}),
    ],
)
def test_small_blocks_equal_the_mask_of_transformers(
    family: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks whose ends differ, in packs with and without shared prompts."""
    monkeypatch.setattr(masked_attention, "BLOCK", 5)
    monkeypatch.setattr(masked_attention, "SCORES_AT_ONCE", 32 * 60)
    check_packed(save_tiny(family, tmp_path, **changes))


class Largest(TorchDispatchMode):
    """Counts the elements of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                # what an expanded tensor has in memory
                held = tensor.untyped_storage().nbytes() // tensor.element_size()
                self.elements = max(self.elements, held)
        return out


def test_no_tensor_grows_with_the_square_of_a_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward of one sample, and of one twice as long."""
    monkeypatch.setattr(masked_attention, "BLOCK", 16)
    monkeypatch.setattr(masked_attention, "SCORES_AT_ONCE", 2**14)
    model = load_hf_model(save_tiny("GLM-5", tmp_path), torch.float32, "cpu", NAME)
    builder = InputBuilder(backbone_of(model), CPU, stateful=prepare_packing(model))
    scorer = PolicyScorer(model)
    found = []
    for length in (256, 512):
        tokens = torch.arange(length) % VOCAB
        inputs = builder.build([tokens], [8], [0], [None])
        with Largest() as largest:
            scorer(inputs)[0].log_probs.sum().backward()
        found.append(largest.elements)
    assert found[1] <= 2 * found[0] < 512 * 512, found
