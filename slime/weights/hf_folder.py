"""Read the tensors of a Hugging Face checkpoint, and write a new one in the dtypes of
``--save-hf-dtype``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from slime.config.hf_config import MTP_COUNTS
from slime.models.quantized import without_quantization
from slime.models.shards import (
    ModelError,
    copy_side_files,
    own_head,
    quantization_of,
    read_headers,
    resolve_folder,
    shorten,
)
from slime.models.stored import StoredWeights
from slime.weights.update import FULL_PRECISION


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


class MtpLayers:
    """The layers for multi-token prediction of a checkpoint. slime does not train them; an export
    contains them unchanged.

    Attributes:
        count: The number of layers that config.json gives.
        names: The names of their tensors; empty if the files of the checkpoint lack them.
    """

    def __init__(self, source: str | Path | None) -> None:
        """
        Args:
            source: The folder of the checkpoint from which a model was made; None if it is not on
                this machine.
        """
        self.source = source
        self.count = 0
        self.names = list[str]()
        if source is None:
            return
        config = json.loads((Path(source) / "config.json").read_text())
        self.count = zero_mtp_counts(config)[1]
        if self.count and read_headers(Path(source)):
            self._stored = StoredWeights(Path(source))
            layers = int(
                config.get("num_hidden_layers")
                or config.get("text_config", {}).get("num_hidden_layers", 0)
            )
            self.names = [name for name in self._stored.shapes() if _is_of_mtp(name, layers)]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors as they are in the files; quantized ones are dequantized."""
        for name in self.names:
            yield name, self._stored.get(name)

    def config_changes(self, config: Mapping[str, object]) -> dict[str, object]:
        """Return the changes to a config.json for an export: none if it contains the layers,
        otherwise zero counts.
        """
        return {} if self.names else zero_mtp_counts(config)[0]

    @property
    def notice(self) -> str | None:
        """What a user should know about an export; None if the model has no such layers."""
        if not self.count:
            return None
        if self.names:
            return (
                f"its {self.count} layer(s) for multi-token prediction are those of "
                f"{self.source}, not trained"
            )
        return (
            f"the {self.count} layer(s) for multi-token prediction that config.json of "
            f"{self.source} counts are not in its files, so they are not written. The new "
            "config.json has none"
        )


def _is_of_mtp(name: str, layers: int) -> bool:
    """Whether a tensor belongs to a layer after the last decoder layer, or to a module for
    multi-token prediction.
    """
    if re.search(r"(?:^|\.)mtp(?:_layers)?\.", name):
        return True
    # not those of a vision tower
    numbered = re.match(r"(?:model\.|language_model\.)*layers\.(\d+)\.", name)
    return numbered is not None and int(numbered[1]) >= layers > 0


def zero_mtp_counts(config: Mapping[str, object]) -> tuple[dict[str, object], int]:
    """Return the changes that set the counts of layers for multi-token prediction to 0, also in
    ``text_config``.

    Returns:
        The keys of ``config`` that change, with their new values, and the sum of the old counts.
    """
    counts = {
        name: value for name in MTP_COUNTS if isinstance(value := config.get(name), int) and value
    }
    changes: dict[str, object] = dict.fromkeys(counts, 0)
    count = sum(counts.values())
    text = config.get("text_config")
    if isinstance(text, Mapping):
        in_text, more = zero_mtp_counts(text)
        if more:
            changes["text_config"] = {**text, **in_text}
        count += more
    return changes, count


SCORE = "score.weight"
"""The name of the head, ``[1, hidden]``, in the checkpoint of a model that scores texts."""


def score_changes(model_type: str, dtype: torch.dtype) -> dict[str, object]:
    """Return the changes of config.json with which ``AutoModelForSequenceClassification`` loads an
    export that has :data:`SCORE`.

    Raises:
        ModelError: transformers has no such class for models of this type.
    """
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as CLASSES,
    )

    if model_type not in CLASSES:
        raise ModelError(f"transformers has no class for scores of models of type {model_type!r}")
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "architectures": [CLASSES[model_type]],
        "id2label": {"0": "score"},
        "label2id": {"score": 0},
        # Often the end token, which transformers would then not read.
        "pad_token_id": None,
    }


def write_side_files(
    source: Path | None,
    path: Path,
    mtp: MtpLayers | None,
    changes: Mapping[str, object],
    config: Mapping[str, object] | None = None,
) -> None:
    """Write what an export holds besides its weights, which must be there. config.json is the last
    file: without it, a folder cannot be loaded.

    All files are copies of those of ``source``, byte for byte. Only config.json has no
    ``quantization_config``, has ``changes``, and ties the embeddings only if the weights do.

    Args:
        source: The folder of the checkpoint from which the model was made; None if it is not on
            this machine.
        mtp: The layers for multi-token prediction that are written too; None if every tensor of
            ``source`` is.
        config: The content of config.json if there is no ``source``.
    """
    if source is not None:
        copy_side_files(source, path)
        config = json.loads((source / "config.json").read_text())
    plain = without_quantization(config or {})
    plain.update(mtp.config_changes(plain) if mtp is not None else {})
    if "dtype" in changes:
        plain = _with_dtype(plain, changes["dtype"])
    if own_head(path, read_headers(path)):
        plain = _untied(plain)
    (path / "config.json").write_text(json.dumps({**plain, **changes}, indent=2) + "\n")


def _with_dtype(config: Mapping[str, object], dtype: object) -> dict[str, object]:
    """Replace the dtype wherever a config or a part of it gives one."""
    changed = {
        key: _with_dtype(value, dtype) if isinstance(value, dict) else value
        for key, value in config.items()
    }
    return {
        key: dtype if key in ("dtype", "torch_dtype") else value for key, value in changed.items()
    }


def _untied(config: Mapping[str, object]) -> dict[str, object]:
    text = config.get("text_config")
    parts = {"text_config": _untied(text)} if isinstance(text, dict) else {}
    return {**config, **parts, "tie_word_embeddings": False}


SOURCE = "source"


class ExportForm:
    """The dtypes of one export. Every rank needs one, because tensors are cast before they are
    gathered.

    Attributes:
        dtype: The dtype in which the training backend should yield float parameters; None for the
            one in which it trains them. For ``source`` it is float32, so that they are rounded
            once.
    """

    def __init__(self, choice: str | None, folder: Path | None, writer: bool) -> None:
        """
        Args:
            choice: The value of ``--save-hf-dtype``; None for the dtype in which the model is
                trained.
            folder: The checkpoint from which the model was made, on the rank that writes; None if
                it is not there.
            writer: Whether this rank writes.
        """
        named = {
            None: None,
            "float32": torch.float32,
            "bfloat16": torch.bfloat16,
            SOURCE: torch.float32,
        }
        self.dtype: torch.dtype | None = named[choice]
        self._cast = None if choice == SOURCE else self.dtype
        self._stored: StoredWeights | None = None
        # raised at the end of the stream, which other ranks also read
        self._failure: ModelError | None = None
        self._as_source = choice == SOURCE and writer
        if not self._as_source:
            return
        if folder is None:
            self._failure = ModelError(
                "--save-hf-dtype source needs the files of --hf-checkpoint on this machine"
            )
            return
        try:
            self._stored = StoredWeights(folder)
            self._config = json.loads((folder / "config.json").read_text())
        except ModelError as error:
            self._failure = error

    def tensors(self, named: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors as they are to be written. ``named`` is always read to its end, because
        that may be a collective operation.

        Raises:
            ModelError: At the end, if a tensor does not fit the source, or a quantized one of it
                did not come.
        """
        if not self._as_source:
            for name, tensor in named:
                casts = tensor.is_floating_point() and not name.endswith(FULL_PRECISION)
                yield name, tensor.to(self._cast) if self._cast and casts else tensor
            return
        seen = set[str]()
        for name, tensor in named:
            seen.add(name)
            yield from self._as_stored(name, tensor).items()
        if self._failure is not None:
            raise self._failure
        assert self._stored is not None
        if lost := sorted(set(self._stored.plan.weights) - seen):
            raise ModelError(
                f"the model does not write {shorten(lost)}, which {self._stored.folder} has "
                "quantized"
            )
        for name in sorted(self._stored.plan.left_out):
            yield name, self._stored.read(name)

    def _as_stored(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        if self._stored is None or self._failure is not None:
            return {}
        try:
            return self._stored.store(name, tensor.detach().cpu())
        except ModelError as error:
            self._failure = error
            return {}

    def config_changes(self) -> dict[str, object]:
        """Return the entries of config.json that say how the weights are stored."""
        if self._stored is None:
            return {} if self._cast is None else {"dtype": str(self._cast).removeprefix("torch.")}
        changes: dict[str, object] = {"dtype": str(self._stored.dtype).removeprefix("torch.")}
        quantization = quantization_of(self._config)
        return changes if quantization is None else {**changes, "quantization_config": quantization}
