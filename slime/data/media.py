"""Images, videos and audio of a prompt: collects them from messages, and loads images from files,
URLs or bytes.
"""

from __future__ import annotations

import base64
import functools
import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.request import urlopen

if TYPE_CHECKING:
    from PIL import Image

FETCH_SECONDS = 30.0


@dataclass(frozen=True)
class MultimodalType:
    """One kind of media: its placeholder in text, and the keyword argument by which processors take
    it.
    """

    name: str
    placeholder: str
    processor_key: str


class MultimodalTypes:
    IMAGE = MultimodalType("image", "<image>", "images")
    VIDEO = MultimodalType("video", "<video>", "videos")
    AUDIO = MultimodalType("audio", "<audio>", "audio")
    ALL: tuple[MultimodalType, ...] = (IMAGE, VIDEO, AUDIO)

    @classmethod
    def all(cls) -> list[MultimodalType]:
        """Return all kinds."""
        return list(cls.ALL)

    @classmethod
    def get(cls, name: str) -> MultimodalType:
        """Return the kind with this name.

        Raises:
            ValueError: There is no such kind.
        """
        for kind in cls.ALL:
            if kind.name == name:
                return kind
        raise ValueError(
            f"unknown media type {name!r} (known: {', '.join(kind.name for kind in cls.ALL)})"
        )


def collect_media(messages: Sequence[Mapping[str, object]]) -> dict[str, list[Any]] | None:
    """The media parts of messages, by the keyword argument of processors; None if there are no
    media.
    """
    media: dict[str, list[Any]] = {}
    # Parts are of slime's form, ``{"type": "image", "image": …}``, or of OpenAI's, ``image_url``.
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else []:
            for kind in MultimodalTypes.ALL:
                if isinstance(part, dict) and part.get("type") in (kind.name, f"{kind.name}_url"):
                    item = part.get(part["type"])  # in OpenAI's form, an object with a URL
                    if part["type"] != kind.name and isinstance(item, dict):
                        item = item.get("url")
                    media.setdefault(kind.processor_key, []).append(item)
    return media or None


def load_image(item: object) -> Image.Image:
    """Load a PIL image in RGB from a PIL image, a path, a file:, http(s): or data: URL, bytes, or
    ``{"bytes"|"path"}``.

    Raises:
        FileNotFoundError: The file does not exist.
        TypeError: ``item`` is none of these.
    """
    from PIL import Image

    # From the most direct form to the least: an image, an object, bytes, a URL with the bytes, a
    # place.
    if isinstance(item, Image.Image):
        return item.convert("RGB")
    if isinstance(item, dict):
        return load_image(item.get("path") if item.get("bytes") is None else item["bytes"])
    if isinstance(item, bytes):
        return Image.open(io.BytesIO(item)).convert("RGB")
    if not isinstance(item, str | Path):
        raise TypeError(
            "an image must be a path, a URL, bytes, an object with bytes or path, or a PIL image, "
            f"not {type(item).__name__}"
        )
    text = str(item)
    if text.startswith("data:"):
        return load_image(base64.b64decode(text.partition(",")[2]))
    path = _local_path(text)
    if path is None:
        return load_image(_fetched(text))
    if not path.is_file():
        raise FileNotFoundError(f"image {path} does not exist (looked for {path.absolute()})")
    return load_image(path.read_bytes())


def absent_file(item: object) -> str | None:
    """The path from which :func:`load_image` would read an image, if there is no such file."""
    if isinstance(item, Mapping) and item.get("bytes") is None:
        item = item.get("path")
    path = _local_path(item) if isinstance(item, str) and not item.startswith("data:") else None
    # Path.is_file() raises an error for a name that is too long, such as base64 that lacks its
    # data: URL.
    return None if path is None or os.path.isfile(path) else str(path)


def is_remote(item: object) -> bool:
    """Whether an image is given by an http(s) URL."""
    return isinstance(item, str) and item.lower().startswith(("http://", "https://"))


def _local_path(text: str) -> Path | None:
    """The file that a path or a file: URL names; None for an http(s): URL."""
    # Path.expanduser() raises an error for a user who does not exist; such a path is reported as a
    # missing file.
    return None if is_remote(text) else Path(os.path.expanduser(text.removeprefix("file://")))


@functools.lru_cache(maxsize=64)
def _fetched(url: str) -> bytes:
    """The content of an http(s) URL; cached, because all samples of a group and all their requests
    need it.
    """
    with urlopen(url, timeout=FETCH_SECONDS) as answer:
        return bytes(answer.read())


def processor_inputs(media: Mapping[str, Sequence[object]]) -> dict[str, Sequence[object]]:
    """Convert media to the arguments of a processor: images are loaded, all other media are passed
    on unchanged.
    """
    return {
        key: [load_image(i) for i in items] if key == "images" else items
        for key, items in media.items()
    }


def encode_image_for_rollout_engine(image: object) -> str:
    """Return an image, in any form that :func:`load_image` takes, as a ``data:`` URL of a PNG for
    an engine's ``image_data``."""
    buffer = io.BytesIO()
    load_image(image).save(buffer, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def process_vision_info(
    prompt: Sequence[Mapping[str, object]], processor: object = None
) -> dict[str, Sequence[object]]:
    """Return the media of messages by the keyword argument of processors, with images loaded:
    ``{"images": [...]}``.

    Args:
        processor: Not used; images are resized by the processor itself.
    """
    return processor_inputs(collect_media(prompt) or {})


def build_processor_kwargs(
    multimodal_inputs: Mapping[str, Sequence[object]] | None = None,
) -> dict[str, Any]:
    """Return the keyword arguments of a processor for media: lists of token ids, and PyTorch
    tensors for the media.
    """
    kwargs: dict[str, Any] = dict(processor_inputs(multimodal_inputs or {}))
    tensors = {f"{kind}_kwargs": {"return_tensors": "pt"} for kind in ("images", "videos", "audio")}
    return {**kwargs, "text_kwargs": {"return_tensors": None}, **tensors}
