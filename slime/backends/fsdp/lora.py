"""The adapter of a trained model (LoRA): its layers, its files, and the identity of the base that it belongs to."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from slime.backends.bank import CopySettings, WeightBank, shard_box
from slime.backends.collectives import local
from slime.backends.fsdp.gathering import whole_tensors
from slime.config.args import Args
from slime.config.lora import adapter_file
from slime.config.seeds import derive_seed
from slime.models.cpu_linear import CpuLinear
from slime.models.lora import LoraLinear, LoraSettings, adapters_off, add_lora, lora_layers, merged, shortest_targets
from slime.models.peft_files import Factors, peft_config, read_config, read_factors, write_adapter
from slime.models.shards import ModelError, shorten

Named = Sequence[tuple[str, nn.Parameter]]
_CHUNK = 1 << 22  # elements of a tensor that are hashed at a time


def lora_settings(args: Args) -> LoraSettings | None:
    """Return the shape of the adapter; None if the weights themselves are trained."""
    if not args.lora_rank:
        return None
    return LoraSettings(
        rank=args.lora_rank,
        alpha=args.lora_alpha,
        dropout=args.lora_dropout,
        rslora=args.use_rslora,
        init=args.lora_init,
        targets=tuple(args.lora_target_modules),
        exclude=tuple(args.lora_exclude_modules or ()),
    )


def add_adapter(
    model: nn.Module, layers: Sequence[nn.Module], settings: LoraSettings, seed: int, load: str | None = None
) -> None:
    """Freeze the model and add an adapter, with the values of PEFT's files in the folder ``load``, if it has any.

    Raises:
        ModelError: The flags select no layer, or the adapter in ``load`` has other layers or shapes.
    """
    added = add_lora(model, layers, settings, partial(_seed_of, seed))
    if adapter_file(load) is None or load is None:
        return
    read_config(load)  # refuses adapters of another kind
    stored = read_factors(load)
    if stored.keys() != added.keys():
        raise ModelError(
            f"the adapter in {load} has layers that --lora-target-modules and --lora-exclude-modules do not select, or "
            f"lacks some: {shorten(sorted(stored.keys() ^ added.keys()))}"
        )
    for name, layer in added.items():
        for mine, theirs in zip((layer.lora_A, layer.lora_B), stored[name], strict=True):
            if mine.shape != theirs.shape:
                shapes = f"{tuple(theirs.shape)}, but {tuple(mine.shape)} in the model"
                raise ModelError(f"the adapter in {load} does not fit the model: {name} has a factor {shapes}")
            if not mine.is_meta:
                mine.data.copy_(theirs)


def _seed_of(seed: int, name: str) -> int:
    return derive_seed(seed, f"adapter of {name}")


class AdapterMerge:
    """Adds the adapter to the weights of a model, shard by shard.

    The factors ``A`` are gathered at the first use, in one collective operation for all layers. The rows of a weight
    and of its ``B`` are sharded alike, so that nothing else has to be gathered before the weights are.
    """

    def __init__(self, model: nn.Module) -> None:
        self.layers = {f"{name}.weight": layer for name, layer in lora_layers(model).items()}
        self._factors: dict[str, Tensor] | None = None

    @torch.no_grad()
    def __call__(self, name: str, weight: Tensor) -> Tensor:
        """Return the weight with its adapter, in float32; the same tensor if it has none."""
        layer = self.layers.get(name)
        if layer is None:
            return weight
        if self._factors is None:
            self._factors = dict(whole_tensors((key, x.lora_A.detach()) for key, x in self.layers.items()))
        values = merged(local(weight), self._factors[name], local(layer.lora_B.detach()), layer.lora_scale)
        if not isinstance(weight, DTensor):
            return values
        return DTensor.from_local(
            values,
            weight.device_mesh,
            weight.placements,
            run_check=False,
            shape=weight.shape,
            stride=weight.stride(),
        )


class TrainedAdapter:
    """The adapter of one role's model.

    Attributes:
        trained: The parameters that are trained: the adapter, and the head of a critic.
        base: All others.
        copies: Whole models besides the base: a teacher, or a reference with another base.
    """

    def __init__(self, args: Args, settings: LoraSettings, model: nn.Module, named: Named, shard_size: int) -> None:
        self.settings, self.base_path = settings, str(args.hf_checkpoint)
        self.model = model
        self.layers = lora_layers(model)
        self.trained = [(name, p) for name, p in named if p.requires_grad]
        self.base = [(name, p) for name, p in named if not p.requires_grad]
        self.copies: WeightBank | None = None
        self._shard_size = shard_size
        self._identity: dict[str, str] | None = None

    def make_copies(
        self,
        settings: CopySettings,
        bank: WeightBank,
        whole: WeightBank,
        initial: str,
        load: Callable[[str, str], None],
    ) -> None:
        """Make the copies that the flags require.

        The reference is the base without the adapter, so that it needs a copy only if it is refreshed, or if it has
        another base.

        Args:
            bank: The copies of the adapter.
            whole: The copies of the base.
            initial: The path of the base.
            load: ``load(tag, path)`` reads a model into the copy ``tag`` of ``whole``.
        """
        self.copies = whole
        if settings.ref and settings.ref_load and settings.ref_load != initial:
            load("ref", settings.ref_load)
        elif settings.ref and settings.ref_moves:
            bank.copy("actor", "ref")
            for name, tensor in bank.tensors("ref").items():
                if name.endswith(".lora_B"):
                    tensor.zero_()
            bank.moving.add("ref")
        if settings.teacher_load is not None:
            load("teacher", settings.teacher_load)
        if settings.old_actor:
            bank.copy("actor", "old_actor")
            bank.moving.add("old_actor")

    @contextmanager
    def using(self, tag: str, bank: WeightBank) -> Iterator[None]:
        """Let the model compute as one of the copies within the context."""
        if self.copies is not None and tag in self.copies.copies:
            with adapters_off(self.layers.values()), self.copies.using(tag):
                yield
        elif tag == "ref" and tag not in bank.copies:
            with adapters_off(self.layers.values()):
                yield
        else:
            with bank.using(tag):
                yield

    def factors(self) -> dict[str, Factors]:
        """Return the whole factors by the names of their modules. This is a collective operation."""
        parts = [(f"{name}.{x}", getattr(layer, x).detach()) for name, layer in self.layers.items() for x in _FACTORS]
        whole = dict(whole_tensors(parts))
        return {name: Factors(*(whole[f"{name}.{x}"] for x in _FACTORS)) for name in self.layers}

    def save(self, path: Path, writer: bool) -> None:
        """Write the adapter in the format of PEFT. This is a collective operation, in which one rank writes."""
        factors = self.factors()
        if writer:
            linears = [name for name, module in self.model.named_modules() if isinstance(module, _LINEAR)]
            targets = shortest_targets(list(self.layers), linears)
            write_adapter(path, self.config(targets), factors)

    def config(self, targets: Sequence[str]) -> dict[str, Any]:
        """Return the content of PEFT's ``adapter_config.json`` with these names of modules."""
        return peft_config(self.settings, targets, self.base_path)

    def describe(self) -> dict[str, Any]:
        """Return what a snapshot says about the adapter. This is a collective operation."""
        computed = {name: asdict(self.settings)[name] for name in ("rank", "alpha", "rslora")}
        return {**computed, "base": self.base_path, "base_identity": self.identity()}

    def require_fit(self, path: Path, stored: Mapping[str, Any] | None) -> None:
        """Compare the description in a snapshot with this adapter. This is a collective operation.

        Raises:
            ValueError: The snapshot has the weights of a whole model, another base, or an adapter of another shape.
        """
        mine = self.describe()
        if stored is None:
            raise ValueError(
                f"{path} has the weights of a whole model, and --lora-rank trains an adapter: export them with "
                "--save-hf, and pass the export as --hf-checkpoint"
            )
        for name in ("rank", "alpha", "rslora"):
            if stored[name] != mine[name]:
                flag = "--use-rslora" if name == "rslora" else f"--lora-{name}"
                raise ValueError(f"{path} has an adapter with {name} {stored[name]}, but {flag} is {mine[name]}")
        theirs = stored["base_identity"]
        if any(theirs[dtype] != value for dtype, value in mine["base_identity"].items() if dtype in theirs):
            raise ValueError(
                f"{path} has an adapter of the base {stored['base']}, whose weights differ from those of "
                f"--hf-checkpoint {self.base_path}: an adapter is of no use without its base"
            )

    def identity(self) -> dict[str, str]:
        """Return digests of the base's values by dtype, equal for every number of ranks.

        The values are hashed in bfloat16, so that a run with another ``--train-dtype`` can compare, and also in float32
        if that is their dtype. This is a collective operation at the first call.
        """
        if self._identity is None:
            dtypes = [torch.bfloat16]
            if all(p.dtype == torch.float32 for _, p in self.base):
                dtypes.append(torch.float32)
            self._identity = {
                str(dtype).removeprefix("torch."): base_digest(self.base, dtype, self._shard_size) for dtype in dtypes
            }
        return self._identity


_FACTORS = ("lora_A", "lora_B")
_LINEAR = (nn.Linear, CpuLinear, LoraLinear)


@torch.no_grad()
def base_digest(named: Named, dtype: torch.dtype, shard_size: int) -> str:
    """Return a digest of the values of all parameters, rounded to ``dtype``, which does not depend on the sharding.

    The bits of each element are multiplied by an odd number that depends on its position, and summed modulo 2**64.
    This is a collective operation if the parameters are sharded.

    Args:
        shard_size: The number of ranks that share one replica of the model. Only the first replica is counted.
    """
    counts = not dist.is_initialized() or dist.get_rank() < shard_size
    zero = torch.zeros((), dtype=torch.int64, device=local(named[0][1]).device)
    sums = torch.stack([_weighted_sum(p, dtype) if counts else zero for _, p in named])
    if any(isinstance(p, DTensor) for _, p in named):
        dist.all_reduce(sums)
    text = "\n".join(f"{name} {value}" for (name, _), value in zip(named, sums.tolist(), strict=True))
    return hashlib.sha256(text.encode()).hexdigest()


def _weighted_sum(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    flat = local(parameter.detach()).reshape(-1)
    start = 0
    if isinstance(parameter, DTensor):  # FSDP shards rows
        start = shard_box(parameter)[0][0] * parameter.shape[1:].numel()
    bits = torch.int16 if dtype == torch.bfloat16 else torch.int32
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for offset in range(0, flat.numel(), _CHUNK):
        chunk = flat[offset : offset + _CHUNK].to(dtype).view(bits).long()
        position = torch.arange(start + offset, start + offset + chunk.numel(), device=flat.device)
        total += (chunk * (position * 0x2545F4914F6CDD1D | 1)).sum()
    return total
