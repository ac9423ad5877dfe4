"""In which dtypes an export is written: ``--save-hf-dtype``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from slime.models.folder import quantization_of
from slime.models.shards import ModelError, shorten
from slime.models.stored import StoredWeights
from slime.weights.update import FULL_PRECISION

SOURCE = "source"


class ExportForm:
    """The dtypes of one export. Every rank needs one, because tensors are cast before they are gathered.

    Attributes:
        dtype: The dtype in which the training backend should yield float parameters; None for the one in which it
            trains them. For ``source`` it is float32, so that they are rounded once.
    """

    def __init__(self, choice: str | None, folder: Path | None, writer: bool) -> None:
        """
        Args:
            choice: The value of ``--save-hf-dtype``; None for the dtype in which the model is trained.
            folder: The checkpoint from which the model was made, on the rank that writes; None if it is not there.
            writer: Whether this rank writes.
        """
        named = {None: None, "float32": torch.float32, "bfloat16": torch.bfloat16, SOURCE: torch.float32}
        self.dtype: torch.dtype | None = named[choice]
        self._cast = None if choice == SOURCE else self.dtype
        self._stored: StoredWeights | None = None
        self._failure: ModelError | None = None  # raised at the end of the stream, which other ranks also read
        self._as_source = choice == SOURCE and writer
        if not self._as_source:
            return
        if folder is None:
            self._failure = ModelError("--save-hf-dtype source needs the files of --hf-checkpoint on this machine")
            return
        try:
            self._stored = StoredWeights(folder)
            self._config = json.loads((folder / "config.json").read_text())
        except ModelError as error:
            self._failure = error

    def tensors(self, named: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors as they are to be written. ``named`` is always read to its end, because that may be a
        collective operation.

        Raises:
            ModelError: At the end, if a tensor does not fit the source, or a quantized one of it did not come.
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
            raise ModelError(f"the model does not write {shorten(lost)}, which {self._stored.folder} has quantized")
        for name in sorted(self._stored.plan.left_out):
            yield name, self._stored.header_tensor(name)

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
