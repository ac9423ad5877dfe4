"""What of a model is trained: parameters by their names, or an adapter (LoRA) with its copies, its
files and the identity of the base that it belongs to."""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slime.backends.bank import WeightBank
from slime.config.lora import LoraConfig, adapter_file
from slime.config.seeds import derive_seed
from slime.models.lora import LoraSettings, Switched, adapters_off
from slime.models.peft_files import Factors, peft_config, read_config, read_factors, write_adapter
from slime.models.shards import ModelError, shorten

Names = Sequence[str]
"""The names of the checkpoint tensors in one parameter. There are several if a backend fuses
them.
"""
Patterns = Sequence[str] | None


def select_trainable(
    held: Iterable[tuple[nn.Parameter, Names]],
    everywhere: Sequence[Names],
    only: Patterns,
    freeze: Patterns,
    head: str | None = None,
) -> None:
    """Freeze parameters by ``--only-train-params-name-list`` or ``--freeze-params-name-list``.

    These are regular expressions that are searched in the names of the checkpoint.

    Args:
        held: The parameters of this rank.
        everywhere: The names of all parameters of the model, including those on other pipeline
            stages, so that all ranks find the same errors.
        only: The regular expressions of ``--only-train-params-name-list``.
        freeze: The regular expressions of ``--freeze-params-name-list``.
        head: How the names of a critic's head begin. No checkpoint has it, so ``only`` does not
            freeze it: with random values that are never trained, the critic would learn nothing.

    Raises:
        ValueError: The expressions divide a fused parameter, match nothing, or leave no parameter
            to train.
    """
    if not only and not freeze:
        return
    # A pattern without a match is a typing error, and training the wrong parameters would not show.
    flag, patterns = (
        ("--only-train-params-name-list", only)
        if only
        else ("--freeze-params-name-list", freeze or [])
    )
    for pattern in patterns:
        if not any(re.search(pattern, name) for names in everywhere for name in names):
            raise ValueError(
                f"{flag} {pattern!r} matches no parameter; names look like {everywhere[0][0]!r}"
            )

    def is_trained(names: Names) -> bool:
        if only and head is not None and names[0].startswith(head):
            return True
        named = {any(re.search(pattern, name) for pattern in patterns) for name in names}
        if len(named) > 1:
            raise ValueError(
                f"{flag} separates {', '.join(names[:3])}, which the training backend keeps in "
                "one parameter: name all of them or none"
            )
        return named.pop() == bool(only)

    # The list is complete before anything is frozen: every rank must find the same problem.
    if not any([is_trained(names) for names in everywhere]):
        raise ValueError(f"{flag} leaves no parameter to train")
    for parameter, names in held:
        parameter.requires_grad_(is_trained(names))


Named = Sequence[tuple[str, Tensor]]
_CHUNK = 1 << 22  # elements of a tensor that are hashed at a time


def lora_settings(lora: LoraConfig) -> LoraSettings | None:
    """Return the shape of the adapter; None if the weights themselves are trained."""
    if not lora.lora_rank:
        return None
    return LoraSettings(
        rank=lora.lora_rank,
        alpha=lora.lora_alpha,
        dropout=lora.lora_dropout,
        rslora=lora.use_rslora,
        init=lora.lora_init,
        targets=tuple(lora.lora_target_modules),
        exclude=tuple(lora.lora_exclude_modules or ()),
    )


def seed_of(seed: int, name: str) -> int:
    """Return the seed for the initial values of the layer with this name."""
    return derive_seed(seed, f"adapter of {name}")


def stored_factors(
    load: str | None, shapes: Mapping[str, tuple[tuple[int, ...], ...]]
) -> dict[str, Factors] | None:
    """Read the adapter in PEFT's files in the folder ``load``; None if it has none.

    Args:
        shapes: The shapes of ``A`` and ``B`` of each layer with an adapter.

    Raises:
        ModelError: The adapter has another form, other layers or other shapes.
    """
    if adapter_file(load) is None or load is None:
        return None
    settings, _ = read_config(load)  # refuses adapters of another kind
    stored = read_factors(load, settings.rank)
    if stored.keys() != shapes.keys():
        raise ModelError(
            f"the adapter in {load} has layers that --lora-target-modules and "
            "--lora-exclude-modules do not select, or lacks some: "
            f"{shorten(sorted(stored.keys() ^ shapes.keys()))}"
        )
    for name, mine in shapes.items():
        for shape, theirs in zip(mine, stored[name], strict=True):
            if shape != theirs.shape:
                text = f"{tuple(theirs.shape)}, but {tuple(shape)} in the model"
                raise ModelError(
                    f"the adapter in {load} does not fit the model: {name} has a factor {text}"
                )
    return stored


class TrainedAdapter(ABC):
    """The adapter of one role's model.

    Attributes:
        trained: The parameters that are trained: the adapter, and the head of a critic.
        base: All others.
        copies: Whole models besides the base: a teacher, or a reference with another base.
    """

    def __init__(
        self, base_path: str, settings: LoraSettings, named: Named, quantization: str | None = None
    ) -> None:
        """
        Args:
            base_path: A checkpoint with the configuration of the base.
            quantization: How the base is stored (``--lora-base-quantization``).
            named: All parameters of the model, or those on this rank.
        """
        self.settings = settings
        self.base_path = base_path
        self.quantization = quantization
        self.trained = [(name, p) for name, p in named if p.requires_grad]
        self.base = [(name, p) for name, p in named if not p.requires_grad]
        self.copies: WeightBank | None = None
        self._identity: dict[str, str] | None = None

    @abstractmethod
    def switches(self) -> Iterable[Switched]:
        """Return the layers with adapters on this rank."""

    @abstractmethod
    def layer_names(self) -> list[str]:
        """Return the names of the layers whose factors engines get."""

    @abstractmethod
    def factors(self) -> dict[str, Factors]:
        """Return the whole factors by the names of their modules. This is a collective
        operation.
        """

    @abstractmethod
    def targets(self) -> list[str]:
        """Return the names for ``target_modules`` in the adapter's files."""

    @abstractmethod
    def digests(self) -> dict[str, str]:
        """Return digests of the base's values by dtype, equal for every number of ranks.

        The values are hashed in bfloat16, so that a run with another ``--train-dtype`` can compare,
        and also in float32 if that is their dtype. This is a collective operation.
        """

    @contextmanager
    def using(self, tag: str, bank: WeightBank) -> Iterator[None]:
        """Let the model compute as one of the copies within the context."""
        if self.copies is not None and tag in self.copies.copies:
            with adapters_off(self.switches()), self.copies.using(tag):
                yield
        elif tag == "ref" and tag not in bank.copies:
            with adapters_off(self.switches()):
                yield
        else:
            with bank.using(tag):
                yield

    def save(self, path: Path, writer: bool) -> None:
        """Write the adapter in the format of PEFT. This is a collective operation, in which one
        rank writes.
        """
        factors = self.factors()
        if writer:
            write_adapter(path, self.config(self.targets()), factors)

    def config(self, targets: Sequence[str]) -> dict[str, Any]:
        """Return the content of PEFT's ``adapter_config.json`` with these names of modules."""
        return peft_config(self.settings, targets, self.base_path)

    def describe(self) -> dict[str, Any]:
        """Return what a snapshot says about the adapter. This is a collective operation."""
        computed = {name: asdict(self.settings)[name] for name in ("rank", "alpha", "rslora")}
        base = {"base": self.base_path, "base_quantization": self.quantization}
        return {
            **computed,
            "targets": sorted(self.targets()),
            **base,
            "base_identity": self.identity(),
        }

    def require_fit(self, path: Path, stored: Mapping[str, Any] | None) -> None:
        """Compare the description in a snapshot with this adapter. This is a collective operation.

        Raises:
            ValueError: The snapshot has the weights of a whole model, another base, or an adapter
                of another shape.
        """
        # Each difference has its own way out, so each has its own message.
        mine = self.describe()
        if stored is None:
            raise ValueError(
                f"{path} has the weights of a whole model, and --lora-rank trains an adapter: "
                "export them with --save-hf, and pass the export as --hf-checkpoint"
            )
        for name in ("rank", "alpha", "rslora"):
            if stored[name] != mine[name]:
                flag = "--use-rslora" if name == "rslora" else f"--lora-{name}"
                raise ValueError(
                    f"{path} has an adapter with {name} {stored[name]}, but {flag} is {mine[name]}"
                )
        if (theirs := stored.get("targets", mine["targets"])) != mine["targets"]:
            raise ValueError(
                f"{path} has an adapter on {shorten(theirs)}, but --lora-target-modules and "
                f"--lora-exclude-modules select {shorten(mine['targets'])}: what it learned on "
                "other layers would be lost"
            )
        if (other := stored.get("base_quantization")) != self.quantization:
            raise ValueError(
                f"{path} has an adapter of a base that is {_bits(other)}, but here it is "
                f"{_bits(self.quantization)}: change --lora-base-quantization, because an adapter "
                "makes up for the rounding of its base"
            )
        # Digests exist for one dtype or two; those that both sides have must be equal.
        known = stored["base_identity"]
        if any(
            known[dtype] != value
            for dtype, value in mine["base_identity"].items()
            if dtype in known
        ):
            raise ValueError(
                f"{path} has an adapter of the base {stored['base']}, whose weights differ from "
                f"those of --hf-checkpoint {self.base_path}: an adapter is of no use without its "
                "base"
            )

    def identity(self) -> dict[str, str]:
        """Return :meth:`digests`, which are computed at the first call. That one is a collective
        operation.
        """
        if self._identity is None:
            self._identity = self.digests()
        return self._identity


def _bits(quantization: object) -> str:
    return "not quantized" if quantization is None else f"in {quantization}"


def require_fit(
    adapter: TrainedAdapter | None, path: Path, stored: Mapping[str, Any] | None
) -> None:
    """Compare the description of an adapter in a snapshot, if it has one, with what is trained.
    This is a collective operation.

    Raises:
        ValueError: They do not fit. The message says what to do.
    """
    if adapter is not None:
        adapter.require_fit(path, stored)
    elif stored is not None:
        raise ValueError(
            f"{path} has only an adapter of {stored['base']}: add --lora-rank {stored['rank']}, "
            "or merge an export of --save-hf into the base with slime merge-lora"
        )


def weighted_sum(flat: Tensor, start: int, dtype: torch.dtype) -> Tensor:
    """Return the sum modulo 2**64 of the bits of each element, each multiplied by an odd number
    that depends on its position.

    Args:
        flat: Some elements of a tensor ``[n]``, which are rounded to ``dtype``.
        start: The position of the first in the whole tensor.
    """
    bits = torch.int16 if dtype == torch.bfloat16 else torch.int32
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for offset in range(0, flat.numel(), _CHUNK):
        chunk = flat[offset : offset + _CHUNK].to(dtype).view(bits).long()
        position = torch.arange(start + offset, start + offset + chunk.numel(), device=flat.device)
        total += (chunk * (position * 0x2545F4914F6CDD1D | 1)).sum()
    return total


def digest_of(sums: Iterable[tuple[str, int]]) -> str:
    """Return a digest of the names of tensors and their :func:`weighted_sum`."""
    return hashlib.sha256("\n".join(f"{name} {value}" for name, value in sums).encode()).hexdigest()
