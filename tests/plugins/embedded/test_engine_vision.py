"""Images in prompts: a tiny LLaVA over HTTP, and Qwen2.5-VL's three rotary axes against
transformers.
"""

from __future__ import annotations

import base64
import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as t
from engine_drivers import finish, load, make
from engine_parts import make_tokenizer
from PIL import Image

sys.path.append(str(Path(__file__).resolve().parents[2] / "models"))
from vision_families import END, IMAGE, START, image, save_tiny_vision

from slime.engines import http
from slime.engines.process import EngineProcess
from slime.utils.async_utils import run

IMAGE_TOKEN = "<image>"
TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 2,
}


def picture(seed: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 255, (30, 40, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def as_base64(image: Image.Image) -> str:
    stream = io.BytesIO()
    image.save(stream, format="PNG")
    return base64.b64encode(stream.getvalue()).decode()


def sharpen(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(5.0)


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-llava")
    tokenizer = make_tokenizer((IMAGE_TOKEN,))
    vision = t.CLIPVisionConfig(
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=28,
        patch_size=14,
        projection_dim=24,
    )
    config = t.LlavaConfig(
        vision_config=vision,
        text_config=t.LlamaConfig(vocab_size=len(tokenizer), **TEXT),
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE_TOKEN),
        vision_feature_layer=-1,
    )
    torch.manual_seed(0)
    model = t.LlavaForConditionalGeneration(config)
    sharpen(model)
    model.save_pretrained(folder)
    size = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
    t.LlavaProcessor(
        image_processor=t.CLIPImageProcessorPil(**size),
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        image_token=IMAGE_TOKEN,
        num_additional_image_tokens=1,
    ).save_pretrained(folder)
    return folder


@pytest.mark.real
def test_llava_over_http(llava: Path, start_engine: Callable[..., EngineProcess]) -> None:
    url = start_engine(llava).url
    model = t.LlavaForConditionalGeneration.from_pretrained(llava, dtype=torch.float32).eval()
    processor = t.AutoProcessor.from_pretrained(llava)
    image_id = processor.tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)

    def ask(**body: Any) -> Any:
        sampling = {"max_new_tokens": 6, "temperature": 1.0, "ignore_eos": True, "sampling_seed": 3}
        return run(
            http.post(
                f"{url}/generate", {"sampling_params": sampling, "return_logprob": True, **body}
            )
        )

    def check(answer: Any, text: str, images: list[Image.Image]) -> None:
        inputs = processor(text=[text], images=images, return_tensors="pt")
        ids = torch.cat([inputs["input_ids"], torch.tensor([answer["output_ids"]])], dim=1)
        with torch.no_grad():
            logits = model(input_ids=ids, pixel_values=inputs["pixel_values"]).logits[0]
        length = inputs["input_ids"].shape[1]
        assert answer["meta_info"]["prompt_tokens"] == length
        expected = torch.log_softmax(logits[length - 1 : -1], -1).gather(1, ids[0, length:, None])[
            :, 0
        ]
        got = torch.tensor([entry[0] for entry in answer["meta_info"]["output_token_logprobs"]])
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)

    one, two = picture(1), picture(2)
    text = f"ab{IMAGE_TOKEN}cd"
    by_text = ask(text=text, image_data=as_base64(one))
    check(by_text, text, [one])
    check(ask(text=text, image_data=f"data:image/png;base64,{as_base64(two)}"), text, [two])
    pair = f"x{IMAGE_TOKEN}y{IMAGE_TOKEN}z"
    check(ask(text=pair, image_data=[as_base64(one), as_base64(two)]), pair, [one, two])
    short = processor.tokenizer(text)["input_ids"]
    assert short.count(image_id) == 1
    by_ids = ask(input_ids=short, image_data=[as_base64(one)])
    assert by_ids["output_ids"] == by_text["output_ids"]
    full = processor(text=[text], images=[one], return_tensors="pt")["input_ids"][0].tolist()
    assert full.count(image_id) == 4
    assert ask(input_ids=full, image_data=[as_base64(one)])["output_ids"] == by_text["output_ids"]
    assert ask(text="no image at all")["output_ids"]
    with pytest.raises(http.HttpError, match="0 image") as failure:
        ask(input_ids=[70, 71], image_data=[as_base64(one)])
    assert failure.value.status == 400
    with pytest.raises(http.HttpError, match="image"):
        ask(text=text, image_data="bm90IGFuIGltYWdl")


@pytest.fixture(scope="module")
def qwen_vl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-qwen-vl")
    tokenizer = make_tokenizer(
        ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    )
    ids = {
        name: tokenizer.convert_tokens_to_ids(f"<|{name}|>")
        for name in ("vision_start", "vision_end")
    }
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": 32,
        "fullatt_block_indexes": [1],
        "patch_size": 14,
        "window_size": 56,
    }
    config = t.Qwen2_5_VLConfig(
        vision_config=vision,
        text_config={
            **TEXT,
            "vocab_size": len(tokenizer),
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [1, 1, 2],
            },
        },
        image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        video_token_id=tokenizer.convert_tokens_to_ids("<|video_pad|>"),
        vision_start_token_id=ids["vision_start"],
        vision_end_token_id=ids["vision_end"],
    )
    torch.manual_seed(0)
    model = t.Qwen2_5_VLForConditionalGeneration(config)
    sharpen(model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("deterministic", [False, True])
def test_qwen_vl_positions(qwen_vl: Path, deterministic: bool) -> None:
    """Decode positions lag behind the token count once an image has folded many tokens into a few
    positions.
    """
    # The processor, which needs torchvision, is only loaded for an image.
    loaded = load(qwen_vl, deterministic=deterministic)
    model = t.Qwen2_5_VLForConditionalGeneration.from_pretrained(
        qwen_vl, dtype=torch.float32
    ).eval()
    config = model.config
    grid = torch.tensor([[1, 4, 6]])  # 24 patches, 6 image tokens
    pixels = torch.randn(24, 3 * 2 * 14 * 14, generator=torch.Generator().manual_seed(0))
    ids = [
        70,
        config.vision_start_token_id,
        *[config.image_token_id] * 6,
        config.vision_end_token_id,
        71,
        72,
    ]
    types = (torch.tensor([ids]) == config.image_token_id).int()
    image = make(ids, "image", seed=1, max_new_tokens=10)
    image.request.image_inputs = {
        "pixel_values": pixels,
        "image_grid_thw": grid,
        "mm_token_type_ids": types,
    }
    text = make([80, 81, 82], "text", seed=2, max_new_tokens=12)
    finish(loaded, [text, image])
    assert image.position_shift != 0 and text.position_shift == 0
    tokens = torch.tensor([image.tokens])
    padded = torch.nn.functional.pad(types, (0, 10))
    with torch.no_grad():
        logits = model(
            input_ids=tokens, pixel_values=pixels, image_grid_thw=grid, mm_token_type_ids=padded
        ).logits[0]
        plain = model(input_ids=torch.tensor([text.tokens])).logits[0]
    for sequence, scores in ((image, logits), (text, plain)):
        first = sequence.prompt_len
        outputs = torch.tensor(sequence.output_ids)[:, None]
        expected = torch.log_softmax(scores[first - 1 : -1], -1).gather(1, outputs)[:, 0]
        torch.testing.assert_close(
            torch.tensor(sequence.output_logprobs), expected, rtol=0, atol=1e-4
        )


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("family", ["Gemma 3", "Qwen3.5"])
def test_images_equal_transformers(family: str, deterministic: bool, tmp_path: Path) -> None:
    """The tokens of Gemma 3's images attend to their whole image; Qwen3.5 has layers with a state
    after them.
    """
    make_tokenizer().save_pretrained(tmp_path)
    folder = save_tiny_vision(family, tmp_path, vocab_size=len(make_tokenizer()))
    loaded = load(folder, deterministic=deterministic)
    model = t.AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    ids = [70, 71, START, *[IMAGE] * 4, END, 72, START, *[IMAGE] * 4, END]
    types, name = (
        (torch.tensor([ids]) == IMAGE).int(),
        "token_type_ids" if family == "Gemma 3" else "mm_token_type_ids",
    )
    parts = [image(family, seed) for seed in (1, 2)]
    pictures = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
    seen, text = (
        make(ids, "image", seed=1, max_new_tokens=10),
        make([80, 81, 82], "text", seed=2, max_new_tokens=12),
    )
    seen.request.image_inputs = {**pictures, name: types}
    finish(loaded, [text, seen])
    with torch.no_grad():
        given: dict[str, Any] = {**pictures, name: torch.nn.functional.pad(types, (0, 10))}
        scores = model(input_ids=torch.tensor([seen.tokens]), **given).logits[0, len(ids) - 1 : -1]
    expected = torch.log_softmax(scores, -1).gather(1, torch.tensor(seen.output_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(seen.output_logprobs), expected, rtol=0, atol=1e-4)
