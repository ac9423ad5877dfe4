"""Images in packs and in padded batches: log-probs and gradients of one sample at a time in
transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from family_checks import CPU, gradients, loss_of
from torch import Tensor
from vision_families import END, FAMILIES, IMAGE, START, image, save_tiny_vision

from slime.models.inputs import InputBuilder
from slime.models.loading import ModelError, backbone_of, empty_model, load_hf_config, load_hf_model
from slime.models.masked_attention import image_blocks_of, images_see_ahead
from slime.models.packed_attention import NAME
from slime.models.packed_layers import prepare_packing
from slime.models.scorer import PolicyScorer

Samples = tuple[list[Tensor], list[int], list[dict[str, Tensor] | None]]
PACKED = {"": "sdpa", "text_config": NAME, "vision_config": "sdpa"}
"""As the FSDP backend loads an image-text model."""


def samples(family: str) -> Samples:
    """Images at the start of a prompt, later in it and two of them; two text samples that share
    their prompt.
    """
    generator = torch.Generator().manual_seed(2)
    tokens, responses, media = [], [], []
    for i, (prompt, response, images) in enumerate(
        [(5, 6, 1), (9, 3, 0), (9, 7, 0), (3, 12, 2), (4, 5, 1)]
    ):
        drawn = torch.randint(3, 55, (prompt + response,), generator=generator).tolist()
        if i == 2:
            drawn[:prompt] = tokens[1][:prompt].tolist()
        place = [START, *[IMAGE] * 4, END] * images
        tokens.append(torch.tensor([*drawn[:2], *place, *drawn[2:]]))
        responses.append(response)
        parts = [image(family, 10 * i + k) for k in range(images)]
        media.append(
            {key: torch.cat([part[key] for part in parts]) for key in parts[0]} if parts else None
        )
    return tokens, responses, media


def one_at_a_time(family: str, folder: Path) -> tuple[Tensor, dict[str, Tensor]]:
    model = load_hf_model(folder, torch.float32, "cpu", "eager")
    scorer, parts = PolicyScorer(model), list[Tensor]()
    for tokens, response, media in zip(*samples(family), strict=True):
        types = "token_type_ids" if family == "Gemma 3" else "mm_token_type_ids"
        extra: dict[str, Any] = (
            {} if media is None else {**media, types: (tokens == IMAGE).int()[None]}
        )
        log_p = model(input_ids=tokens[None], **extra).logits[0, -response - 1 : -1].log_softmax(-1)
        mine = log_p.gather(-1, tokens[-response:, None]).squeeze(-1)
        loss_of(mine, sum(map(len, parts))).backward()
        parts.append(mine.detach())
    return torch.cat(parts), gradients(scorer)


@pytest.mark.parametrize("family", FAMILIES)
def test_images_equal_one_sample_at_a_time(family: str, tmp_path: Path) -> None:
    folder = save_tiny_vision(family, tmp_path)
    want, want_gradients = one_at_a_time(family, folder)
    for attention in (PACKED, "sdpa"):
        model = load_hf_model(folder, torch.float32, "cpu", attention)
        packed = attention is PACKED
        stateful = packed and prepare_packing(model)
        builder = InputBuilder(backbone_of(model), CPU, packed=packed, stateful=stateful)
        scorer, (tokens, responses, media) = PolicyScorer(model), samples(family)
        got = scorer(builder.build(tokens, responses, [0, 1, 1, 2, 3], media))[0].log_probs
        loss_of(got, 0).backward()
        assert float((got.detach() - want).abs().max()) < 1e-5, attention
        found = gradients(scorer)
        for name, gradient in want_gradients.items():
            error = float((found[name] - gradient).norm())
            assert error <= 2e-5 * max(float(gradient.norm()), 1e-2), (attention, name)
        assert any("vis" in name for name in want_gradients)


def test_images_are_runs_of_their_tokens() -> None:
    is_image = torch.tensor([0, 1, 1, 0, 1, 1, 1, 1]).bool()
    assert image_blocks_of(is_image).tolist() == [-1, 0, 0, -1, 1, 1, 1, 1]
    assert image_blocks_of(is_image, torch.tensor([0, 3, 6, 8])).tolist() == [
        -1,
        0,
        0,
        -1,
        1,
        1,
        2,
        2,
    ]


def test_other_masks_by_the_types_of_tokens_are_refused(tmp_path: Path) -> None:
    model = empty_model(load_hf_config(save_tiny_vision("Gemma 3", tmp_path)))
    model.config.model_type = "gemma5"
    with pytest.raises(ModelError, match="Gemma3Model"):
        images_see_ahead(backbone_of(model))
