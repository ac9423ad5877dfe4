"""Low-rank adapters (LoRA) on routed experts, which transformers keeps in one tensor for all
experts of a layer.

Expert ``e`` of ``W [experts, out, in]`` computes with ``W[e] + s B[e] A[e]``, where ``A [experts,
rank, in]`` and ``B [experts, out, rank]`` are trained. The sum is computed once per forward for all
experts of a layer, because the kernels for experts take one weight tensor, so it needs memory for
one more copy of the experts of one layer, and the backward pass computes the gradient of ``W``. The
fused tensor of gate and up has one ``A`` for both.

In PEFT's files each expert has a name of its own (``experts.3.gate_proj``), as in the checkpoints
of these models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import Any

import torch
from torch import Tensor, nn

from slime.models.lora import EXPERTS, LoraSettings, initial_factor, selects
from slime.models.peft_files import Factors
from slime.models.shards import ModelError

PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""The fused tensors of a layer's experts, with the names of their parts in the checkpoint, in order
of their rows.
"""
_SUFFIX = "_lora"


class ExpertFactors(nn.Module):
    """The factors of one fused tensor.

    Attributes:
        lora_A, lora_B: The trained factors, float32 ``[experts, rank, in]`` and ``[experts, out,
            rank]``.
        lora_scale: The factor ``s``.
        lora_on: Whether the experts compute with the adapter.
    """

    def __init__(self, a: Tensor, b: Tensor, scale: float) -> None:
        super().__init__()
        self.lora_A = nn.Parameter(a)
        self.lora_B = nn.Parameter(b)
        self.lora_scale = scale
        self.lora_on = True

    def added_to(self, weight: Tensor) -> Tensor:
        """Return ``W + s B A`` in the dtype of ``weight``."""
        return weight + (torch.bmm(self.lora_B, self.lora_A) * self.lora_scale).to(weight.dtype)


def add_expert_lora(
    layers: Mapping[str, nn.Module], settings: LoraSettings, seed_of: Callable[[str], int]
) -> dict[str, ExpertFactors]:
    """Add adapters to the routed experts of the decoder layers.

    Args:
        layers: The decoder layers by name.
        seed_of: Returns the seed for the initial values of the tensor with this name.

    Returns:
        The factors by the names of the fused tensors.

    Raises:
        ModelError: No layer has experts, they are stored in another form than described in this
            module, or ``settings.exclude`` selects some of them.
    """
    added: dict[str, ExpertFactors] = {}
    for name, module in _experts(layers):
        refuse_excluded(name, settings)
        for weight in PARTS:
            parameter = getattr(module, weight)
            count, outputs, inputs = parameter.shape
            a = torch.empty(count, settings.rank, inputs, device=parameter.device)
            b = torch.zeros(count, outputs, settings.rank, device=parameter.device)
            if not a.is_meta:
                rows = initial_factor(
                    settings, inputs, seed_of(f"{name}.{weight}"), count * settings.rank
                )
                a.copy_(rows.view_as(a))
            added[f"{name}.{weight}"] = ExpertFactors(a, b, settings.scale)
        attach_expert_lora(name, module, added)
    require_experts(added)
    return added


def refuse_excluded(name: str, settings: LoraSettings) -> None:
    """Raise a ModelError if ``settings.exclude`` selects the experts of a layer, which are adapted
    in all or in none.

    Args:
        name: The name of the experts in transformers.
    """
    if unwanted := [pattern for pattern in settings.exclude if selects(pattern, name)]:
        raise ModelError(
            f"--lora-exclude-modules {unwanted[0]!r} selects {name}, but --lora-target-modules "
            f"{EXPERTS} adds adapters to the routed experts of all layers: change one of them"
        )


def require_experts(found: Sized) -> None:
    """Raise a ModelError if no experts were found to add adapters to."""
    if not found:
        raise ModelError(
            f"--lora-target-modules {EXPERTS} selects nothing, because no decoder layer has "
            "routed experts"
        )


def attach_expert_lora(name: str, module: nn.Module, factors: Mapping[str, ExpertFactors]) -> None:
    """Let the experts of one layer compute with their factors.

    Args:
        name: The name of ``module``.
        factors: The factors by the names of the fused tensors, also those of other layers.
    """
    for weight in PARTS:
        setattr(module, f"{weight}{_SUFFIX}", factors[f"{name}.{weight}"])
    module.__class__ = _with_adapter(type(module))


def _experts(layers: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    for prefix, layer in layers.items():
        for name, module in layer.named_modules():
            if name.rpartition(".")[2] != EXPERTS:
                continue
            weights = [getattr(module, weight, None) for weight in PARTS]
            fused = all(isinstance(w, nn.Parameter) and w.dim() == 3 for w in weights)
            if (
                not fused
                or getattr(module, "is_transposed", False)
                or getattr(module, "has_bias", False)
            ):
                raise ModelError(
                    f"--lora-target-modules {EXPERTS}: {prefix}.{name} ({type(module).__name__}) "
                    "does not store its weights as gate_up_proj and down_proj of the form "
                    "[experts, out, in] without biases, so its experts cannot have adapters"
                )
            yield f"{prefix}.{name}", module


def _with_adapter(experts: type[nn.Module]) -> type[nn.Module]:
    """Return the class of experts that compute with their factors."""

    class LoraExperts(experts):  # type: ignore[misc, valid-type]
        # A graph break: the compiler does not follow the exchange of attributes.
        @torch.compiler.disable
        def forward(self, *inputs: Any, **options: Any) -> Any:
            factors = {weight: getattr(self, f"{weight}{_SUFFIX}") for weight in PARTS}
            active = {weight: factor for weight, factor in factors.items() if factor.lora_on}
            try:
                # an attribute of the instance hides its parameter
                for weight, factor in active.items():
                    self.__dict__[weight] = factor.added_to(self._parameters[weight])
                return super().forward(*inputs, **options)
            finally:
                for weight in active:
                    self.__dict__.pop(weight, None)

    LoraExperts.__name__ = experts.__name__
    return LoraExperts


def expert_factors(model: nn.Module) -> dict[str, ExpertFactors]:
    """Return the factors by the names of the fused tensors, in the order of the model."""
    found = {
        name: module for name, module in model.named_modules() if isinstance(module, ExpertFactors)
    }
    return {name.removesuffix(_SUFFIX): module for name, module in found.items()}


def is_expert_module(name: str) -> bool:
    """Return whether the factors ``<name>.lora_A`` and ``<name>.lora_B`` of a snapshot are those of
    a fused tensor.
    """
    return name.endswith(tuple(f".{EXPERTS}.{weight}{_SUFFIX}" for weight in PARTS))


def load_expert_lora(
    model: nn.Module, stored: Mapping[str, Factors], settings: LoraSettings
) -> set[str]:
    """Let a model compute with stored factors of its experts.

    Args:
        stored: The factors of all layers by their names in PEFT's files.

    Returns:
        The names in ``stored`` that were used.

    Raises:
        ModelError: The experts have another form, another number or other shapes than the factors.
    """
    used: set[str] = set()
    for name, module in (
        _experts({"": model}) if any(f".{EXPERTS}." in path for path in stored) else ()
    ):
        name = name.removeprefix(".")
        made = {}
        for weight in PARTS:
            parameter = getattr(module, weight)
            names = expert_names(f"{name}.{weight}", parameter.shape[0])
            if missing := [path for path in names if path not in stored]:
                raise ModelError(f"the adapter has no factors of {missing[0]}")
            a, b = fused(f"{name}.{weight}", stored, parameter.shape[0])
            if (b.shape[1], a.shape[2]) != tuple(parameter.shape[1:]):
                raise ModelError(f"the factors of {name}.{weight} are for experts of another shape")
            made[f"{name}.{weight}"] = ExpertFactors(a, b, settings.scale)
            used.update(names)
        attach_expert_lora(name, module, made)
    return used


def expert_names(name: str, count: int) -> list[str]:
    """Return the names in the checkpoint of the layers that a fused tensor of ``count`` experts
    contains.
    """
    module, _, weight = name.removesuffix(_SUFFIX).rpartition(".")
    return [f"{module}.{expert}.{part}" for expert in range(count) for part in PARTS[weight]]


def per_expert(name: str, a: Tensor, b: Tensor) -> dict[str, Factors]:
    """Return the factors of a fused tensor by the names of its experts' layers in the checkpoint.

    Args:
        name: The name of the fused tensor, with or without the ending of its factors.
    """
    module, _, weight = name.removesuffix(_SUFFIX).rpartition(".")
    parts = PARTS[weight]
    return {
        # safetensors stores no shared memory
        f"{module}.{expert}.{part}": Factors(a[expert].clone(), rows)
        for expert in range(a.shape[0])
        for part, rows in zip(parts, b[expert].chunk(len(parts)), strict=True)
    }


def fused(name: str, stored: Mapping[str, Factors], count: int) -> Factors:
    """Return the factors of a fused tensor from those of its experts; the opposite of
    :func:`per_expert`.

    Args:
        name: The name of the fused tensor.
        count: The number of experts.

    Raises:
        ModelError: Gate and up of an expert have different factors ``A``, which a fused tensor
            cannot have.
    """
    module, _, weight = name.rpartition(".")
    every: list[Sequence[Factors]] = [
        [stored[f"{module}.{expert}.{part}"] for part in PARTS[weight]] for expert in range(count)
    ]
    for expert, parts in enumerate(every):
        if any(not torch.equal(part.a, parts[0].a) for part in parts):
            raise ModelError(
                f"expert {expert} of {module} has different factors lora_A for gate_proj and "
                "up_proj, whose weights are one tensor here: slime loads adapters of experts "
                "only if it has trained them"
            )
    return Factors(
        torch.stack([parts[0].a for parts in every]),
        torch.stack([torch.cat([p.b for p in parts]) for parts in every]),
    )
