"""Figures of plane geometry, questions on them, and a tiny vision-language model that has barely
learned to see.

    python examples/geo3k_vlm/geometry.py FOLDER [--seed 1] [--warm-up-steps 12] [--architecture llava] [--no-model]

writes ``FOLDER/model`` (LLaVA's architecture: a CLIP vision tower, a projector, a Llama; 0.5M
random parameters that a few supervised steps have warmed up; or Gemma 3's),
``FOLDER/figures/*.png``, ``FOLDER/train.jsonl`` and ``FOLDER/eval.jsonl``.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from PIL import Image, ImageDraw

UNITS = 5  # the figure's field is 5 × 5 units
PIXELS = 8  # of a unit, and of a patch of the vision tower
LONGEST = 4  # side of a square
QUESTION = "<image>How long is a side?"
COLOURS = ("crimson", "darkgreen", "navy", "purple", "black")
QWEN: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2_5_vl": ("Qwen2_5_VL", {}, dict(fullatt_block_indexes=[1], window_size=56)),
    "qwen3_vl": ("Qwen3VL", {}, dict(num_position_embeddings=100, deepstack_visual_indexes=[0])),
    "qwen3_5": (
        "Qwen3_5",
        dict(
            **dict(
                linear_num_key_heads=2,
                linear_num_value_heads=4,
                linear_key_head_dim=16,
                linear_value_head_dim=16,
            ),
            layer_types=["linear_attention", "full_attention", "linear_attention"],
        ),
        dict(num_position_embeddings=100),
    ),
}
"""Names in transformers, and what the text part and the vision part have besides the common."""
ARCHITECTURES = ("llava", "gemma3", *QWEN)
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{% if m['content'] is string %}{{ m['content'] }}{% "
    "else %}{% for part in m['content'] %}{% if part['type'] == 'image' %}<image>{% else %}{{ "
    "part['text'] }}{% endif %}{% endfor %}{% endif %}{% if m['role'] == 'assistant' %}<eos>{% "
    "endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@dataclass(frozen=True)
class Square:
    """Side and upper left corner, in units; the right and lower edges lie within the field."""

    side: int
    left: int
    top: int
    colour: str

    @classmethod
    def random(cls, random: Random) -> Square:
        side = random.randint(1, LONGEST)
        return cls(
            side,
            random.randint(0, UNITS - side),
            random.randint(0, UNITS - side),
            random.choice(COLOURS),
        )

    def draw(self, grid: bool = False) -> Image.Image:
        """RGB, 40 × 40; with ``grid`` the field's units are ruled over the figure."""
        image = Image.new("RGB", (UNITS * PIXELS, UNITS * PIXELS), "white")
        pen = ImageDraw.Draw(image)
        x, y = self.left * PIXELS, self.top * PIXELS
        pen.rectangle(
            (x, y, x + self.side * PIXELS - 1, y + self.side * PIXELS - 1), fill=self.colour
        )
        for line in range(PIXELS, UNITS * PIXELS, PIXELS) if grid else ():
            pen.line((line, 0, line, UNITS * PIXELS), fill="orange")
            pen.line((0, line, UNITS * PIXELS, line), fill="orange")
        return image


def write_rows(folder: Path, name: str, count: int, seed: int) -> Path:
    """``count`` figures as PNG files and the rows on them: question, image, answer; the figure in
    the metadata.
    """
    random = Random(f"{seed} {name}")
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    lines = []
    for i in range(count):
        figure = Square.random(random)
        file = folder.resolve() / "figures" / f"{name}-{i}.png"
        figure.draw().save(file)
        row = {"prompt": QUESTION, "images": [str(file)], "label": str(figure.side)}
        lines.append(json.dumps({**row, "metadata": {"figure": vars(figure)}}) + "\n")
    path = folder / f"{name}.jsonl"
    path.write_text("".join(lines), encoding="utf-8")
    return path


async def score(args: Any, sample: Any, **kwargs: Any) -> float:
    """The reward: 1 for exactly the right number."""
    return float(sample.response.strip() == sample.label)


def make_tokenizer(image_tokens: tuple[str, ...] = ("<image>",)) -> Any:
    """One token per byte, the end of a text, and the tokens of images."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
    fast.add_special_tokens({"additional_special_tokens": list(image_tokens)})
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_model(seed: int, architecture: str = "llava") -> tuple[Any, Any]:
    """(model, processor) with random weights; an image is 25 tokens.

    Args:
        architecture: One of :data:`ARCHITECTURES`. The processors of Qwen's models need
            torchvision.
    """
    if architecture in QWEN:
        return make_qwen(seed, architecture)
    return make_gemma3(seed) if architecture == "gemma3" else make_llava(seed)


def make_qwen(seed: int, architecture: str) -> tuple[Any, Any]:
    import torch
    import transformers as t

    start, image, end, video = (
        f"<|{name}|>" for name in ("vision_start", "image_pad", "vision_end", "video_pad")
    )
    tokenizer = make_tokenizer((start, image, end, video))
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in (start, image, end, video)}
    name, more, parts = QWEN[architecture]
    # SGLang knows no other sizes of Qwen2.5-VL's
    patch = dict(patch_size=14, temporal_patch_size=2)
    vision = dict(
        depth=2, hidden_size=64, intermediate_size=128, num_heads=2, out_hidden_size=96, spatial_merge_size=2,
        initializer_range=0.1, **patch, **parts,
    )  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 4, 4]}
    if architecture != "qwen2_5_vl":
        rope |= {"mrope_interleaved": True, "partial_rotary_factor": 1.0}
    text = dict(
        vocab_size=len(tokenizer), hidden_size=96, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4, head_dim=24, max_position_embeddings=512, eos_token_id=1, pad_token_id=0,
        bos_token_id=None, initializer_range=0.1, rope_parameters=rope, **more,
    )  # fmt: skip
    config = getattr(t, f"{name}Config")(
        text_config=text, vision_config=vision, image_token_id=ids[image], video_token_id=ids[video],
        vision_start_token_id=ids[start], vision_end_token_id=ids[end], tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = getattr(t, f"{name}ForConditionalGeneration")(config)
    template = CHAT_TEMPLATE.replace("<image>", f"{start}{image}{end}")
    side = UNITS * 2 * patch["patch_size"]  # four patches are merged into a token
    size = {"shortest_edge": side * side, "longest_edge": side * side}  # numbers of pixels
    reader = t.Qwen2VLImageProcessor(size=size, merge_size=2, **patch)
    videos = t.Qwen2VLVideoProcessor(size=size, merge_size=2, **patch)
    kind = "Qwen2_5_VL" if architecture == "qwen2_5_vl" else "Qwen3VL"
    return model, getattr(t, f"{kind}Processor")(reader, tokenizer, videos, chat_template=template)


def make_gemma3(seed: int) -> tuple[Any, Any]:
    import torch
    import transformers as t

    tokenizer = make_tokenizer(("<boi>", "<soft>", "<eoi>"))
    own = dict(image_token="<soft>", boi_token="<boi>", eoi_token="<eoi>")
    tokenizer = t.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        eos_token="<eos>",
        pad_token="<pad>",
        extra_special_tokens=own,
    )
    side, places = UNITS * PIXELS, UNITS * UNITS
    sizes = dict(intermediate_size=128, num_hidden_layers=2, num_attention_heads=2)
    vision = dict(hidden_size=64, image_size=side, patch_size=PIXELS, **sizes)
    text = dict(
        vocab_size=len(tokenizer), hidden_size=96, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=24, max_position_embeddings=512, eos_token_id=1, pad_token_id=0,
        bos_token_id=None, initializer_range=0.1, sliding_window=32,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )  # fmt: skip
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in own.items()}
    config = t.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=places, image_token_index=ids["image_token"],
        boi_token_index=ids["boi_token"], eoi_token_index=ids["eoi_token"],
    )  # fmt: skip
    torch.manual_seed(seed)
    model = t.Gemma3ForConditionalGeneration(config)
    with torch.no_grad():
        # 0 in a new model
        model.model.multi_modal_projector.mm_input_projection_weight.normal_(std=0.1)
    reader = t.Gemma3ImageProcessorPil(size={"height": side, "width": side}, do_pan_and_scan=False)
    template = CHAT_TEMPLATE.replace("<image>", "<boi>")
    return model, t.Gemma3Processor(
        reader, tokenizer, chat_template=template, image_seq_length=places
    )


def make_llava(seed: int) -> tuple[Any, Any]:
    import torch
    import transformers as t

    tokenizer = make_tokenizer()
    side = UNITS * PIXELS
    vision = t.CLIPVisionConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, image_size=side,
        patch_size=PIXELS, projection_dim=64, initializer_range=0.1,
    )  # fmt: skip
    text = t.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=96, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=512, eos_token_id=1, pad_token_id=0, bos_token_id=None,
        initializer_range=0.1,
    )  # fmt: skip
    config = t.LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-1,
    )
    torch.manual_seed(seed)
    model = t.LlavaForConditionalGeneration(config)
    processor = t.LlavaProcessor(
        image_processor=t.CLIPImageProcessorPil(size={"shortest_edge": side}, do_center_crop=False),
        tokenizer=tokenizer,
        patch_size=PIXELS,
        vision_feature_select_strategy="default",
        image_token="<image>",
        num_additional_image_tokens=1,
        chat_template=CHAT_TEMPLATE,
    )
    return model, processor


def warm_up(
    model: Any, processor: Any, steps: int, seed: int, batch: int = 32, lr: float = 1e-3
) -> float:
    """Supervised steps on figures of their own; returns the last loss, in nats per answer token."""
    import torch

    random, loss = Random(f"{seed} warm-up"), float("nan")
    content = [{"type": "image"}, {"type": "text", "text": QUESTION.removeprefix("<image>")}]
    text = processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    ids = {d: processor.tokenizer(d)["input_ids"][0] for d in map(str, range(1, LONGEST + 1))}
    for _ in range(steps):
        figures = [Square.random(random) for _ in range(batch)]
        inputs = processor(
            text=[text] * batch, images=[[figure.draw()] for figure in figures], return_tensors="pt"
        )
        answers = torch.tensor([[ids[str(figure.side)], 1] for figure in figures])
        types = {
            k: torch.nn.functional.pad(v, (0, 1))
            for k, v in inputs.items()
            if k.endswith("token_type_ids")
        }
        given = {k: inputs[k] for k in ("pixel_values", "image_grid_thw") if k in inputs} | types
        logits = model(
            input_ids=torch.cat([inputs["input_ids"], answers[:, :1]], dim=1), **given
        ).logits[:, -2:]
        cost = torch.nn.functional.cross_entropy(logits.flatten(0, 1), answers.flatten())
        optimizer.zero_grad()
        cost.backward()
        optimizer.step()
        loss = float(cost.detach())
    return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--warm-up-steps", type=int, default=12)
    parser.add_argument("--architecture", choices=ARCHITECTURES, default="llava")
    parser.add_argument("--no-model", action="store_true", help="figures and questions only")
    args = parser.parse_args()
    train, held_out = (
        write_rows(args.folder, name, n, args.seed) for name, n in (("train", 512), ("eval", 64))
    )
    print(f"geometry: {train}, {held_out}")
    if args.no_model:
        return
    model, processor = make_model(args.seed, args.architecture)
    loss = warm_up(model, processor, args.warm_up_steps, args.seed)
    model.save_pretrained(args.folder / "model")
    processor.save_pretrained(args.folder / "model")
    size = sum(p.numel() for p in model.parameters())
    print(
        f"geometry: {args.folder / 'model'}, {size / 1e6:.1f}M parameters, warm-up loss {loss:.2f}"
    )


if __name__ == "__main__":
    main()
