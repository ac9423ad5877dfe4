"""A tiny vision-language model walks the training step: pixels in, log-probs as transformers
computes them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp_helpers import make_args, make_backend, make_samples, whole_batch
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from slime.backends.train_loop import train_on_rollout

IMAGE, VISION_START, VISION_END = 60, 58, 59
ROPE = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    text = dict(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    text |= dict(num_key_value_heads=2, head_dim=8, initializer_range=0.2, rope_parameters=ROPE)
    vision = dict(
        depth=2,
        hidden_size=32,
        intermediate_size=48,
        num_heads=4,
        patch_size=4,
        spatial_merge_size=2,
    )
    vision |= dict(temporal_patch_size=1, out_hidden_size=32, num_position_embeddings=64)
    vision |= dict(deepstack_visual_indexes=[0], initializer_range=0.2)
    config = Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=61,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        tie_word_embeddings=True,
    )
    path = tmp_path_factory.mktemp("vl")
    Qwen3VLForConditionalGeneration(config).save_pretrained(path)
    return path


def image(seed: int) -> dict[str, Any]:
    """4x4 patches of 3 channels, merged 2x2 into four image tokens."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(16, 3 * 4 * 4, generator=generator)
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 4, 4]])}


def mixed_batch() -> dict[str, Any]:
    """Two groups of three: the first with an image each, the second text only (those share their
    prompt).
    """
    samples = make_samples(groups=2, size=3)
    for sample in samples:
        sample["tokens"] = [t % 50 for t in sample["tokens"]]
        if sample["group"] == 0:
            sample["tokens"] = [VISION_START, *[IMAGE] * 4, VISION_END, *sample["tokens"]]
    batch = whole_batch(samples, micro_batch_size=6)
    batch["multimodal_train_inputs"] = [image(0) if s["group"] == 0 else None for s in samples]
    return batch


def expected_log_probs(checkpoint: Path, batch: dict[str, Any]) -> list[torch.Tensor]:
    model = Qwen3VLForConditionalGeneration.from_pretrained(
        checkpoint, attn_implementation="eager"
    ).double()
    out = []
    for tokens, response, media in zip(
        batch["tokens"], batch["response_lengths"], batch["multimodal_train_inputs"], strict=True
    ):
        extra = {}
        if media:
            types = (tokens == IMAGE).int()[None]
            extra = dict(
                media, pixel_values=media["pixel_values"].double(), mm_token_type_ids=types
            )
        with torch.no_grad():
            log_p = (
                model(input_ids=tokens[None], **extra).logits[0].log_softmax(-1)[-response - 1 : -1]
            )
        out.append(log_p.gather(-1, tokens[-response:, None]).squeeze(-1))
    return out


@pytest.mark.parametrize("attention", [None, "sdpa"])
def test_packed_images_equal_transformers(checkpoint: Path, attention: str | None) -> None:
    batch = mixed_batch()
    backend = make_backend(make_args(checkpoint, attn_implementation=attention))
    got = backend.log_probs(batch)["log_probs"]
    for mine, want in zip(got, expected_log_probs(checkpoint, batch), strict=True):
        torch.testing.assert_close(mine.double(), want, rtol=1e-5, atol=1e-5)


def test_training_moves_the_vision_tower_too(checkpoint: Path) -> None:
    args = make_args(checkpoint, global_batch_size=6, rollout_batch_size=2, n_samples_per_prompt=3)
    backend = make_backend(args)
    inputs = backend.builder.from_batch(mixed_batch(), list(range(6)))
    shared = len(mixed_batch()["tokens"][3]) - mixed_batch()["response_lengths"][3]
    assert inputs.kwargs["input_ids"].shape[1] == sum(mixed_batch()["total_lengths"]) - 2 * shared
    before = {name: tensor.clone() for name, tensor in backend.named_weights()}
    metrics, _ = train_on_rollout(backend, mixed_batch())
    assert metrics["train/grad_norm"] > 0.0
    changed = [
        name for name, tensor in backend.named_weights() if not torch.equal(before[name], tensor)
    ]
    assert any(".visual." in name for name in changed)
    assert any(".language_model." in name for name in changed)


@pytest.mark.parametrize("of_logits", [False, True])
def test_every_loss_of_text_gives_the_vision_parameters_a_gradient(
    checkpoint: Path, of_logits: bool
) -> None:
    """On several ranks, those without images reduce the same parameters as the others."""
    backend = make_backend(make_args(checkpoint))
    scorer: Any = backend.scorer
    scorer.anchored = [p for name, p in scorer.named_parameters() if ".visual." in name]
    inputs = backend.builder.build([torch.arange(1, 9)], [4], [0], [None])
    scores, logits = scorer(inputs, 1.0, with_logits=True)
    (logits if of_logits else scores.log_probs).sum().backward()
    assert scorer.anchored and all(p.grad is not None and not p.grad.any() for p in scorer.anchored)
