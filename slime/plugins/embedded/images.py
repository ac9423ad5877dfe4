"""Read the images of a request and convert them to inputs of the model's forward."""

from __future__ import annotations

import base64
import io
from typing import TYPE_CHECKING

import torch

from slime.plugins.http.server import BadRequest

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_BYTES = 32 * 2**20  # the encoded size of one image
MAX_PIXELS = 64 * 10**6
MAX_IMAGES = 256  # per prompt
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")


class ImageReader:
    """Prepares images with the processor of the checkpoint."""

    def __init__(
        self, model_path: str, device: torch.device, dtype: torch.dtype, trust_remote_code: bool
    ) -> None:
        from transformers import AutoProcessor

        self.processor = AutoProcessor.from_pretrained(
            model_path, trust_remote_code=trust_remote_code
        )
        self.device = device
        self.dtype = dtype
        tokenizer = self.processor.tokenizer
        self.token = str(getattr(self.processor, "image_token", None) or tokenizer.image_token)
        self.token_id = int(tokenizer.convert_tokens_to_ids(self.token))
        # Most processors repeat the placeholder of an image. That of Gemma 3 puts other tokens in
        # its place.
        self.soft_id = int(getattr(tokenizer, "image_token_id", None) or self.token_id)

    def prepare(
        self, ids: list[int], text: str | None, images: list[object]
    ) -> tuple[list[int], dict[str, object]]:
        """Return the token ids of the prompt with all image placeholders, and the image tensors for
        the model.

        Args:
            ids: The prompt, used if ``text`` is None. It has one placeholder per image, or already
                as many as the processor makes for each image. Other ids are not changed.
            text: The prompt with one placeholder per image, which the processor expands; or None.

        Raises:
            BadRequest: An image cannot be read, or the placeholders do not match the images.
        """
        if len(images) > MAX_IMAGES:
            raise BadRequest(
                f"image_data contains {len(images)} images, but at most {MAX_IMAGES} are allowed"
            )
        pictures = [load_image(item) for item in images]
        if text is not None:
            made = self.processor(text=[text], images=pictures, return_tensors="pt")
            ids = made["input_ids"][0].tolist()
        else:
            # Only the placeholders are expanded: the other ids must not change, so they are not
            # tokenized again.
            made = self.processor(
                text=[self.token * len(pictures)], images=pictures, return_tensors="pt"
            )
            ids = self._expand(ids, pictures, int((made["input_ids"] == self.soft_id).sum()))
        inputs = {
            key: value
            for key, value in made.to(self.device, self.dtype).items()
            if key not in ("input_ids", "attention_mask")
        }
        is_image = torch.tensor([ids], device=self.device) == self.soft_id
        for key in inputs:
            if key.endswith("token_type_ids"):
                inputs[key] = is_image.long()
        return ids, inputs

    def _expand(self, ids: list[int], pictures: list[Image], expected: int) -> list[int]:
        if ids.count(self.soft_id) == expected:
            return ids
        present = ids.count(self.token_id)
        if present != len(pictures):
            raise BadRequest(
                f"input_ids contain {present} image tokens ({self.token}), but {len(pictures)} "
                f"images need one each, or {expected} in total"
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


def load_image(item: object) -> Image:
    """Return a PIL image in RGB from base64, a ``data:`` URL, or ``{"url": …}`` with one of these.

    Other URLs and paths are refused: with them, everyone who can reach the port could read files of
    this machine and access its network.

    Raises:
        BadRequest: The item has another form, is too large, or is not an image.
    """
    from PIL import Image

    if isinstance(item, dict):
        item = item.get("url") or item.get("image")
    if not isinstance(item, str) or not item:
        raise BadRequest("image_data must be base64 or data: URLs")
    shown = repr(item[:60])
    try:
        encoded = item.partition(",")[2] if item.startswith("data:") else item
        image = Image.open(io.BytesIO(_decoded(encoded)), formats=FORMATS)
        if image.width * image.height > MAX_PIXELS:
            raise BadRequest(
                f"image {shown} has {image.width} x {image.height} pixels, more than {MAX_PIXELS}"
            )
        return image.convert("RGB")
    except BadRequest:
        raise
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise BadRequest(
            f"cannot read image {shown} ({error}): image_data must be base64 or data: URLs"
        ) from error


def _decoded(text: str) -> bytes:
    if len(text) > MAX_BYTES * 4 // 3 + 4:
        raise BadRequest(
            f"an image has {len(text)} characters of base64, but at most {MAX_BYTES} bytes are "
            "allowed"
        )
    return base64.b64decode(text, validate=True)
