"""Read the tensors of a Hugging Face checkpoint, and write a new checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from slime.config.hf_config import MTP_COUNTS
from slime.models.folder import COPIED_FILES, resolve_folder
from slime.models.quantized import without_quantization
from slime.models.shards import INDEX
from slime.models.stored import StoredWeights

SHARD_BYTES = 4 * 1024**3


class HfFolder(StoredWeights):
    """The weights of a safetensors checkpoint by name. A tensor is read when it is requested."""

    def __init__(self, path: str | Path) -> None:
        """
        Args:
            path: A folder or a hub id.

        Raises:
            ModelError: See :class:`~slime.models.stored.StoredWeights`.
        """
        super().__init__(resolve_folder(path))


def write_tensors(named: Iterable[tuple[str, Tensor]], path: Path, writer: bool) -> None:
    """Write a stream of tensors as safetensors files with an index.

    Ranks with ``writer`` False only iterate over the stream, because producing it may be a collective operation.
    """
    shards: list[tuple[str, list[str]]] = []
    pending: dict[str, Tensor] = {}
    total = size = 0
    if writer:
        path.mkdir(parents=True, exist_ok=True)

    def flush() -> None:
        file = f"model-{len(shards) + 1:05d}.safetensors"
        save_file(pending, str(path / file), metadata={"format": "pt"})
        shards.append((file, list(pending)))
        pending.clear()

    for name, tensor in named:
        if not writer:
            continue
        nbytes = tensor.numel() * tensor.element_size()
        if pending and size + nbytes > SHARD_BYTES:
            flush()
            size = 0
        pending[name] = tensor.detach().to("cpu", copy=True).contiguous()
        size, total = size + nbytes, total + nbytes
    if not writer:
        return
    flush()
    if len(shards) == 1:
        (path / shards[0][0]).rename(path / "model.safetensors")
        return
    weight_map = {name: file for file, names in shards for name in names}
    (path / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2))


def copy_companions(source: str | Path, path: Path) -> None:
    """Copy tokenizer, processor and model code of the checkpoint from which a model was made."""
    for pattern in COPIED_FILES:
        for file in Path(source).glob(pattern):
            shutil.copy2(file, path / file.name)


def without_mtp_layers(source: str | Path) -> tuple[dict[str, object], str | None]:
    """Return the changes to config.json for a checkpoint without layers for multi-token prediction, and a notice.

    Returns:
        Changes for :func:`copy_config`, and a notice for the user. They are empty and None if ``source`` has no such
        layers.
    """
    changes, count = zero_mtp_counts(json.loads((Path(source) / "config.json").read_text()))
    if not count:
        return {}, None
    return changes, (
        f"the {count} layer(s) for multi-token prediction of {source} are not trained and not written. The new "
        "config.json has none, so engines cannot use them as a draft model"
    )


def zero_mtp_counts(config: Mapping[str, object]) -> tuple[dict[str, object], int]:
    """Return the changes that set the counts of layers for multi-token prediction to 0, also in ``text_config``.

    Returns:
        The keys of ``config`` that change, with their new values, and the sum of the old counts.
    """
    counts = {name: value for name in MTP_COUNTS if isinstance(value := config.get(name), int) and value}
    changes: dict[str, object] = dict.fromkeys(counts, 0)
    count = sum(counts.values())
    text = config.get("text_config")
    if isinstance(text, Mapping):
        in_text, more = zero_mtp_counts(text)
        if more:
            changes["text_config"] = {**text, **in_text}
        count += more
    return changes, count


def copy_config(source: str | Path, path: Path, **changes: object) -> None:
    """Copy config.json and generation_config.json, without ``quantization_config`` and with ``changes``."""
    config = without_quantization(json.loads((Path(source) / "config.json").read_text()))
    (path / "config.json").write_text(json.dumps({**config, **changes}, indent=2) + "\n")
    if (Path(source) / "generation_config.json").is_file():
        shutil.copy2(Path(source) / "generation_config.json", path / "generation_config.json")
