"""Adapters (LoRA) on the linear layers of a model of transformers that FSDP shards."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from slime.backends.bank import shard_box
from slime.backends.collectives import NamedTensor, local, sharded_like, whole_tensors
from slime.backends.fsdp.low_precision import quantized_layers
from slime.backends.trainable import (
    TrainedAdapter,
    digest_of,
    seed_of,
    stored_factors,
    weighted_sum,
)
from slime.models.cpu_kernels import CpuLinear
from slime.models.lora import (
    EXPERTS,
    LoraLinear,
    LoraSettings,
    add_lora,
    lora_layers,
    merged,
    shortest_targets,
)
from slime.models.lora_experts import (
    ExpertFactors,
    add_expert_lora,
    expert_factors,
    expert_names,
    fused,
    per_expert,
)
from slime.models.peft_files import Factors

Named = Sequence[tuple[str, nn.Parameter]]


def add_adapter(
    model: nn.Module,
    layers: Sequence[nn.Module],
    settings: LoraSettings,
    seed: int,
    load: str | None = None,
) -> None:
    """Freeze the model and add an adapter, with the values of PEFT's files in the folder ``load``,
    if it has any.

    Raises:
        ModelError: The flags select no layer, or the adapter in ``load`` has other layers or
            shapes.
    """
    added: dict[str, LoraLinear | ExpertFactors] = {
        **add_lora(model, layers, settings, partial(seed_of, seed))
    }
    shapes = {name: (tuple(x.lora_A.shape), tuple(x.lora_B.shape)) for name, x in added.items()}
    if EXPERTS in settings.targets:
        names = {id(module): name for name, module in model.named_modules()}
        experts = add_expert_lora(
            {names[id(layer)]: layer for layer in layers}, settings, partial(seed_of, seed)
        )
        added.update(experts)
        shapes |= {
            path: (tuple(a.shape), tuple(b.shape))
            for name, x in experts.items()
            for path, (a, b) in per_expert(name, x.lora_A, x.lora_B).items()
        }
    stored = stored_factors(load, shapes)
    if stored is None:
        return
    for name, module in added.items():
        a, b = (
            fused(name, stored, len(module.lora_A))
            if isinstance(module, ExpertFactors)
            else stored[name]
        )
        for mine, theirs in ((module.lora_A, a), (module.lora_B, b)):
            if not mine.is_meta:
                mine.data.copy_(theirs)


class AdapterMerge:
    """Adds the adapter to the weights of a model, shard by shard.

    :attr:`names` are the names of the weights that have one.

    The factors ``A`` are gathered at the first use, in one collective operation for all layers. The
    rows of a weight and of its ``B`` are sharded alike, so that nothing else has to be gathered
    before the weights are.
    """

    def __init__(self, model: nn.Module) -> None:
        self.linears = {f"{name}.weight": layer for name, layer in lora_layers(model).items()}
        self.experts = expert_factors(model)
        self.names = self.linears.keys() | self.experts.keys()
        self._factors: dict[str, Tensor] | None = None

    @torch.no_grad()
    def __call__(self, name: str, weight: Tensor) -> Tensor:
        """Return the weight with its adapter, in float32; the same tensor if it has none."""
        experts = self.experts.get(name)
        layer = experts or self.linears.get(name)
        if layer is None:
            return weight
        if self._factors is None:
            self._factors = dict(
                whole_tensors((key, x.lora_A.detach()) for key, x in self.linears.items())
            )
        # Experts are sharded, and so are both of their factors.
        a = self._factors[name] if experts is None else local(experts.lora_A.detach())
        values = merged(local(weight), a, local(layer.lora_B.detach()), layer.lora_scale)
        return sharded_like(values, weight)


class FsdpAdapter(TrainedAdapter):
    """An adapter whose factors are sharded like all parameters."""

    def __init__(
        self,
        base_path: str,
        settings: LoraSettings,
        model: nn.Module,
        named: Named,
        shard_size: int,
        quantization: str | None,
    ) -> None:
        super().__init__(base_path, settings, named, quantization)
        self.model = model
        self.layers = lora_layers(model)
        self._shard_size = shard_size
        self.experts = expert_factors(model)
        layers = quantized_layers(model)
        self.codes = [
            (f"{name}.{key}", x)
            for name, layer in layers.items()
            for key, x in layer.named_buffers()
        ]

    def switches(self) -> list[LoraLinear | ExpertFactors]:
        """See :meth:`TrainedAdapter.switches`."""
        return [*self.layers.values(), *self.experts.values()]

    def layer_names(self) -> list[str]:
        """See :meth:`TrainedAdapter.layer_names`."""
        return list(self.layers)

    def factors(self) -> dict[str, Factors]:
        """See :meth:`TrainedAdapter.factors`."""
        layers = {**self.layers, **self.experts}
        parts = [
            (f"{name}.{x}", getattr(layer, x).detach())
            for name, layer in layers.items()
            for x in _FACTORS
        ]
        whole = dict(whole_tensors(parts))
        found = {name: Factors(*(whole[f"{name}.{x}"] for x in _FACTORS)) for name in layers}
        for name in self.experts:
            found |= per_expert(name, *found.pop(name))
        return found

    def targets(self) -> list[str]:
        """See :meth:`TrainedAdapter.targets`."""
        linears = [
            name for name, module in self.model.named_modules() if isinstance(module, _LINEAR)
        ]
        inside = [
            path
            for name, x in self.experts.items()
            for path in expert_names(name, x.lora_A.shape[0])
        ]
        return shortest_targets([*self.layers, *inside], [*linears, *inside])

    def digests(self) -> dict[str, str]:
        """See :meth:`TrainedAdapter.digests`."""
        dtypes = [torch.bfloat16]
        if all(p.dtype == torch.float32 for _, p in self.base):
            dtypes.append(torch.float32)
        named = [*self.base, *self.codes]  # integers of 8 bits are exact in bfloat16
        return {
            str(dtype).removeprefix("torch."): base_digest(named, dtype, self._shard_size)
            for dtype in dtypes
        }


_FACTORS = ("lora_A", "lora_B")
_LINEAR = (nn.Linear, CpuLinear, LoraLinear)


@torch.no_grad()
def base_digest(named: Sequence[NamedTensor], dtype: torch.dtype, shard_size: int) -> str:
    """Return a digest of the values of all parameters, rounded to ``dtype``, which does not depend
    on the sharding.

    This is a collective operation if the parameters are sharded.

    Args:
        shard_size: The number of ranks that share one replica of the model. Only the first replica
            is counted.
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
