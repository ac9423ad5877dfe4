"""Adapters (LoRA) on the routed experts of a rank.

Expert ``e`` computes ``W[e] x + s B[e] A[e] x``: two grouped products of small factors beside that
of the frozen weight. Gate and up of an expert share one ``A``, as with FSDP
(:mod:`slime.models.lora_experts`), where they are one tensor.

Expert parallelism divides the experts. Expert tensor parallelism divides ``B`` of gate and up by
rows, and ``A`` of down by columns, like the weights. The other two factors are whole on each of its
ranks. The rows of all these ranks are gathered before the experts and the outputs are summed after
them (Megatron's dispatcher), so that each rank computes a part of the gradient of a whole factor,
and these parts are summed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from torch import Tensor, nn

from slime.backends.trainable import seed_of
from slime.models.grouped_experts import grouped_linear
from slime.models.lora import EXPERTS, LoraSettings, initial_factor
from slime.models.lora_experts import PARTS, fused, refuse_excluded, require_experts
from slime.models.peft_files import Factors
from slime.plugins.megatron.core import MegatronError
from slime.plugins.megatron.experts import GroupedExperts
from slime.plugins.megatron.lora_layers import FACTOR_A, FACTOR_B, WEIGHT, FactorPair
from slime.plugins.megatron.maps import Stacked
from slime.plugins.megatron.maps.family import COLUMNS, REPLICATED, Entry


@dataclass(frozen=True)
class ExpertWeight:
    """The weights of all experts of a layer that are one parameter on each rank.

    Attributes:
        source: The entry of the parameter.
        module: The name of the experts in transformers (``model.layers.0.mlp.experts``).
    """

    source: Entry
    module: str

    @property
    def kind(self) -> str:
        """``gate_up`` or ``down``."""
        return self.source.megatron.rpartition(".")[2]

    @property
    def name(self) -> str:
        """The name of the fused tensor in transformers."""
        return f"{self.module}.{self.kind}_proj"

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of its parts in the checkpoint, in order of their rows."""
        return PARTS[f"{self.kind}_proj"]

    def names(self, expert: int) -> list[str]:
        """Return the names of the linear layers of one expert."""
        return [f"{self.module}.{expert}.{part}" for part in self.parts]

    def all_names(self) -> list[str]:
        return [name for expert in range(self.source.experts) for name in self.names(expert)]

    def entries(self) -> tuple[Entry, Entry]:
        """Return the entries of the factors. In a snapshot, they have the names that FSDP gives
        them.
        """
        parts = [
            name.replace(f"{self.module}.0.", f"{self.module}.{{expert}}.", 1)
            for name in self.names(0)
        ]
        down = self.source.layout == COLUMNS
        layouts = (COLUMNS, REPLICATED) if down else (REPLICATED, Stacked())
        a = Entry(
            f"{self.name}_lora{FACTOR_A}", (parts[0] + FACTOR_A,), layouts[0], self.source.experts
        )
        b = Entry(
            f"{self.name}_lora{FACTOR_B}",
            tuple(part + FACTOR_B for part in parts),
            layouts[1],
            self.source.experts,
        )
        return a, b

    def factors(self, found: Mapping[str, Tensor]) -> Iterator[tuple[str, Factors]]:
        """Yield the factors by the names of the linear layers, given whole tensors by their names
        in the entries.
        """
        for expert in range(self.source.experts):
            first, *others = self.names(expert)
            a = found[first + FACTOR_A]
            yield first, Factors(a, found[first + FACTOR_B])
            for other in others:
                # safetensors stores no shared memory
                yield other, Factors(a.clone(), found[other + FACTOR_B])

    def shapes(self, held: tuple[int, ...], rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the whole shapes of ``A`` and ``B`` of one of the linear layers, whose adapter has
        this rank.

        Args:
            held: The shape of the parameter on a rank.
        """
        size = mpu.get_expert_tensor_parallel_world_size()
        if self.source.layout == COLUMNS:
            return (rank, held[2] * size), (held[1], rank)
        return (rank, held[3]), (held[2] * size, rank)

    def values(
        self,
        settings: LoraSettings,
        seed: int,
        held: tuple[int, ...],
        stored: Mapping[str, Factors] | None,
    ) -> tuple[Tensor, Tensor]:
        """Return this rank's parts of the factors: those in ``stored``, or the initial ones, which
        are FSDP's.
        """
        count = self.source.experts
        (_, inputs), (rows, _) = self.shapes(held, settings.rank)
        if stored is not None:
            a, b = fused(self.name, stored, count)
        else:
            a = initial_factor(settings, inputs, seed_of(seed, self.name), count * settings.rank)
            b = torch.zeros(count, rows * len(self.parts), settings.rank)
        a = a.view(count, settings.rank, inputs)
        b = b.unflatten(1, (2, -1)) if self.kind == "gate_up" else b
        one, two = (
            _part(entry, whole) for entry, whole in zip(self.entries(), (a, b), strict=True)
        )
        return one, two


def expert_weights(entries: Iterable[Entry], settings: LoraSettings) -> list[ExpertWeight]:
    """Return the weights of experts that have adapters: all of the model, if ``settings.targets``
    says so.

    Raises:
        MegatronError: The checkpoint names or stores experts in another way than
            :class:`ExpertWeight` describes.
        ModelError: No layer has experts, or ``settings.exclude`` selects some of them.
    """
    if EXPERTS not in settings.targets:
        return []
    found = []
    for entry in entries:
        if not entry.experts:
            continue
        kind = entry.megatron.rpartition(".")[2]
        module = entry.hf[0].partition(".{expert}.")[0]
        named = tuple(
            f"{module}.{{expert}}.{part}{WEIGHT}" for part in PARTS.get(f"{kind}_proj", ())
        )
        if named != entry.hf:
            raise MegatronError(
                f"--lora-target-modules {EXPERTS}: the checkpoint has the experts of a layer as "
                f"{', '.join(entry.hf)}, and with --train-backend megatron only experts without "
                "biases that are named gate_proj, up_proj and down_proj can have adapters: leave "
                "it out"
            )
        refuse_excluded(module, settings)
        found.append(ExpertWeight(entry, module))
    require_experts(found)
    return found


class ExpertPair(FactorPair):
    """The factors of the experts on this rank: ``lora_A [n, rank, in]``, and ``lora_B [n, 2, f,
    rank]`` of gate and up or ``[n, H, rank]`` of down, or this rank's parts of them."""

    def mark(self, factor: nn.Parameter, entry: Entry) -> None:
        """See :meth:`FactorPair.mark`. The gradients are reduced over the expert-data-parallel
        group.
        """
        factor.allreduce = False  # type: ignore[attr-defined]
        axis = entry.layout.axis
        set_tensor_model_parallel_attributes(factor, True, 0 if axis is None else axis + 1, 1)
        # The norm of all gradients counts a whole factor on one of the ranks that divide its
        # expert.
        factor.shared = axis is None and mpu.get_expert_tensor_parallel_rank() > 0  # type: ignore[attr-defined]


class LoraExperts(GroupedExperts):
    """The experts of a rank with adapters. Their own weights are frozen.

    Attributes:
        lora: The factors of ``gate_up`` and of ``down``.
        lora_scale: The factor ``s``.
        lora_on: Whether the experts compute with the adapters. If not, they compute exactly what
            they would without.
    """

    lora: nn.ModuleDict
    lora_scale: float
    lora_on: bool

    def project(self, name: str, x: Tensor, counts: Tensor) -> Tensor:
        """See :meth:`GroupedExperts.project`."""
        output = super().project(name, x, counts)
        return output + self._adapter(name, x, counts) if self.lora_on else output

    def _adapter(self, name: str, x: Tensor, counts: Tensor) -> Tensor:
        pair = self.lora[name]()
        assert isinstance(pair, ExpertPair)
        a, b = (self._summed(factor, entry) for factor, entry in pair.by_entry())
        inner = grouped_linear(x, a, counts) * self.lora_scale
        return grouped_linear(inner, b.flatten(1, -2), counts)

    def _summed(self, factor: Tensor, entry: Entry) -> Tensor:
        """Let the gradient of a whole factor be the sum over the ranks that divide its expert."""
        if entry.layout.axis is not None:
            return factor
        return copy_to_tensor_model_parallel_region(factor, group=self.tp_group)


def attach_experts(
    module: GroupedExperts, pairs: Mapping[str, ExpertPair], scale: float
) -> LoraExperts:
    """Change the experts of a rank to ones with adapters. ``pairs`` are the factors of ``gate_up``
    and ``down``.
    """
    module.__class__ = LoraExperts
    assert isinstance(module, LoraExperts)
    module.lora = nn.ModuleDict(pairs)
    module.lora_scale = scale
    module.lora_on = True
    return module


def _part(entry: Entry, whole: Tensor) -> Tensor:
    """Return this rank's part of a factor ``[experts, ...]``."""
    count = entry.experts // mpu.get_expert_model_parallel_world_size()
    mine = whole.narrow(0, count * mpu.get_expert_model_parallel_rank(), count)
    if entry.layout.axis is None:
        return mine
    size = mpu.get_expert_tensor_parallel_world_size()
    rank = mpu.get_expert_tensor_parallel_rank()
    return mine.chunk(size, 1 + entry.layout.axis)[rank]
