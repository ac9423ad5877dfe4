"""Images of a request: from the wire to what the model's forward takes."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import torch

from slime.engines.embedded.protocol import BadRequest


class ImageReader:
    """Wraps the checkpoint's processor."""

    def __init__(self, model_path: str, device: torch.device, dtype: torch.dtype, trust_remote_code: bool) -> None:
        from transformers import AutoProcessor

        self.processor = AutoProcessor.from_pretrained(model_path, trust_remote_code=trust_remote_code)
        self.device = device
        self.dtype = dtype
        tokenizer = self.processor.tokenizer
        self.token = str(getattr(self.processor, "image_token", None) or tokenizer.image_token)
        self.token_id = int(tokenizer.convert_tokens_to_ids(self.token))

    def prepare(self, ids: list[int], text: str | None, images: list[Any]) -> tuple[list[int], dict[str, Any]]:
        """Prompt ids with all image placeholders in place, and the tensors for the model.

        ``text`` holds one placeholder per image and goes through the processor. ``ids`` may hold one
        placeholder per image, or already as many as the processor would make of it; no other id is touched.

        Raises:
            BadRequest: an image cannot be read, or placeholders and images do not match.
        """
        pictures = [load_image(item) for item in images]
        if text is not None:
            made = self.processor(text=[text], images=pictures, return_tensors="pt")
            ids = made["input_ids"][0].tolist()
        else:
            made = self.processor(text=[self.token * len(pictures)], images=pictures, return_tensors="pt")
            ids = self._expand(ids, pictures, int((made["input_ids"] == self.token_id).sum()))
        inputs = {key: self._place(value) for key, value in made.items() if key not in ("input_ids", "attention_mask")}
        is_image = torch.tensor([ids], device=self.device) == self.token_id
        for key in inputs:
            if key.endswith("token_type_ids"):
                inputs[key] = is_image.long()
        return ids, inputs

    def _expand(self, ids: list[int], pictures: list[Any], expected: int) -> list[int]:
        present = ids.count(self.token_id)
        if present == expected:
            return ids
        if present != len(pictures):
            raise BadRequest(
                f"input_ids hold {present} image tokens ({self.token}); {len(pictures)} images need one each, "
                f"or {expected} in all"
            )
        expanded: list[int] = []
        left = iter(pictures)
        for token in ids:
            if token != self.token_id:
                expanded.append(token)
                continue
            made = self.processor(text=[self.token], images=[next(left)], add_special_tokens=False)
            expanded += list(made["input_ids"][0])
        return expanded

    def _place(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.to(self.device, self.dtype if value.is_floating_point() else value.dtype)


def load_image(item: Any) -> Any:
    """A PIL image from base64, a ``data:`` URL, a file path, an ``http(s)`` URL, or ``{"url": …}``.

    Raises:
        BadRequest: it is none of these.
    """
    from PIL import Image, UnidentifiedImageError

    if isinstance(item, dict):
        item = item.get("url") or item.get("image")
    if not isinstance(item, str) or not item:
        raise BadRequest("image_data takes base64, a data: URL, a path or an http URL")
    try:
        return Image.open(io.BytesIO(_image_bytes(item))).convert("RGB")
    except (OSError, ValueError, UnidentifiedImageError) as error:
        raise BadRequest(f"cannot read image {item[:60]!r}: {error}") from error


def _image_bytes(item: str) -> bytes:
    if item.startswith("data:"):
        return base64.b64decode(item.split(",", 1)[1])
    if item.startswith(("http://", "https://")):
        from urllib.request import urlopen

        with urlopen(item, timeout=20) as answer:
            return bytes(answer.read())
    if item.startswith("file://") or (len(item) < 4096 and Path(item).is_file()):
        return Path(item.removeprefix("file://")).read_bytes()
    return base64.b64decode(item, validate=True)
