"""A tiny vision-language model walks the whole loop: images from the rows to engine, batch and
trainer.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(600)]

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{% if m['content'] is string %}{{ m['content'] }}{% "
    "else %}{% for part in m['content'] %}{% if part['type'] == 'image' %}<image>{% else %}{{ "
    "part['text'] }}{% endif %}{% endfor %}{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="session")
def tiny_llava(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random LLaVA of 2 + 2 layers with its processor; 5 image tokens an image."""
    import torch
    import transformers as t

    tokenizer = t.AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    vision = t.CLIPVisionConfig(
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=28,
        patch_size=14,
        projection_dim=24,
    )
    text = t.AutoConfig.from_pretrained(tiny_model).to_dict() | {
        "vocab_size": len(tokenizer),
        "dtype": "float32",
    }
    config = t.LlavaConfig(
        vision_config=vision,
        text_config=t.LlamaConfig(**text),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-1,
    )
    folder = tmp_path_factory.mktemp("tiny-llava") / "model"
    torch.manual_seed(0)
    t.LlavaForConditionalGeneration(config).save_pretrained(folder)
    processor = t.LlavaProcessor(
        image_processor=t.CLIPImageProcessorPil(
            size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}
        ),
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        image_token="<image>",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )
    processor.save_pretrained(folder)
    return folder


def test_images_reach_engine_and_trainer_alike(runner, flags, tiny_llava, tmp_path) -> None:
    from PIL import Image

    rows = []
    for i in range(8):
        pixels = np.random.default_rng(i).integers(0, 255, (30, 40, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{i}.png")
        rows.append(
            {"prompt": f"<image>Write {i}.", "label": "a", "images": [str(tmp_path / f"{i}.png")]}
        )
    data = tmp_path / "pictures.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = runner.inline(
        *flags, "--hf-checkpoint", tiny_llava, "--prompt-data", data, "--multimodal-keys", '{"image": "images"}',
        "--num-rollout", 2,
    )  # fmt: skip
    assert result.code == 0, result.output
    steps = result.metrics()
    assert len(steps) == 2 and all(row["train/grad_norm"] > 0 for row in steps)
    assert max(row["train/train_rollout_logprob_abs_diff"] for row in steps) < 1e-4
