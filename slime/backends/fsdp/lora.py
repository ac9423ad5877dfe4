"""Adapters (LoRA) on the linear layers of a model of transformers that FSDP shards."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from slime.backends.adapter import TrainedAdapter, digest_of, seed_of, stored_factors, weighted_sum
from slime.backends.bank import shard_box
from slime.backends.collectives import local
from slime.backends.fsdp.gathering import whole_tensors
from slime.config.args import Args
from slime.models.cpu_linear import CpuLinear
from slime.models.lora import LoraLinear, LoraSettings, add_lora, lora_layers, merged, shortest_targets
from slime.models.peft_files import Factors

Named = Sequence[tuple[str, nn.Parameter]]


def add_adapter(
    model: nn.Module, layers: Sequence[nn.Module], settings: LoraSettings, seed: int, load: str | None = None
) -> None:
    """Freeze the model and add an adapter, with the values of PEFT's files in the folder ``load``, if it has any.

    Raises:
        ModelError: The flags select no layer, or the adapter in ``load`` has other layers or shapes.
    """
    added = add_lora(model, layers, settings, partial(seed_of, seed))
    stored = stored_factors(load, {name: (x.lora_A.shape, x.lora_B.shape) for name, x in added.items()}) or {}
    for name, (a, b) in stored.items():
        for mine, theirs in ((added[name].lora_A, a), (added[name].lora_B, b)):
            if not mine.is_meta:
                mine.data.copy_(theirs)


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


class FsdpAdapter(TrainedAdapter):
    """An adapter whose factors are sharded like all parameters."""

    def __init__(self, args: Args, settings: LoraSettings, model: nn.Module, named: Named, shard_size: int) -> None:
        super().__init__(args, settings, named)
        self.model, self.layers, self._shard_size = model, lora_layers(model), shard_size

    def switches(self) -> list[LoraLinear]:
        """See :meth:`TrainedAdapter.switches`."""
        return list(self.layers.values())

    def factors(self) -> dict[str, Factors]:
        """See :meth:`TrainedAdapter.factors`."""
        parts = [(f"{name}.{x}", getattr(layer, x).detach()) for name, layer in self.layers.items() for x in _FACTORS]
        whole = dict(whole_tensors(parts))
        return {name: Factors(*(whole[f"{name}.{x}"] for x in _FACTORS)) for name in self.layers}

    def targets(self) -> list[str]:
        """See :meth:`TrainedAdapter.targets`."""
        linears = [name for name, module in self.model.named_modules() if isinstance(module, _LINEAR)]
        return shortest_targets(list(self.layers), linears)

    def digests(self) -> dict[str, str]:
        """See :meth:`TrainedAdapter.digests`."""
        dtypes = [torch.bfloat16]
        if all(p.dtype == torch.float32 for _, p in self.base):
            dtypes.append(torch.float32)
        return {str(dtype).removeprefix("torch."): base_digest(self.base, dtype, self._shard_size) for dtype in dtypes}


_FACTORS = ("lora_A", "lora_B")
_LINEAR = (nn.Linear, CpuLinear, LoraLinear)


@torch.no_grad()
def base_digest(named: Sequence[tuple[str, Tensor]], dtype: torch.dtype, shard_size: int) -> str:
    """Return a digest of the values of all parameters, rounded to ``dtype``, which does not depend on the sharding.

    This is a collective operation if the parameters are sharded.

    Args:
        shard_size: The number of ranks that share one replica of the model. Only the first replica is counted.
    """
    counts = not dist.is_initialized() or dist.get_rank() < shard_size
    zero = torch.zeros((), dtype=torch.int64, device=local(named[0][1]).device)
    sums = torch.stack([_weighted_sum(p, dtype) if counts else zero for _, p in named])
    if any(isinstance(p, DTensor) for _, p in named):
        dist.all_reduce(sums)
    return digest_of(zip((name for name, _ in named), sums.tolist(), strict=True))


def _weighted_sum(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    start = 0
    if isinstance(parameter, DTensor):  # FSDP shards rows
        start = shard_box(parameter)[0][0] * parameter.shape[1:].numel()
    return weighted_sum(local(parameter.detach()).reshape(-1), start, dtype)
