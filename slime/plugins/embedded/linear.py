"""Linear layers: packed for the CPU, and with adapters that requests choose by name.

On the CPU, oneDNN computes them with weights in its blocked layout, and sibling layers as one
product: torch uses MKL for fp32 matrix products, and MKL is slow on CPUs that are not made by Intel
(measured on an AMD EPYC with 64 rows: 130 against 310 GFLOP/s). The packed copies need as much
memory as the weights. The parameters remain the source of truth; :meth:`PackedLinears.refresh`
packs them again after an update.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from slime.models.cpu_kernels import CpuLinear
from slime.models.lora import LoraLinear, LoraSettings, lora_layers
from slime.models.peft_files import Factors
from slime.plugins.embedded.served import WeightError
from slime.plugins.http.server import BadRequest

_PACK_ROWS = 64  # the row count for which the layout is optimized; any count works
_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers of one module that are called one after the other with the same input."""


class PackedLinears:
    """Replaces the forward of all ``nn.Linear`` modules of a model by oneDNN.

    Args:
        fuse: Compute sibling layers (for example query, key and value) as one product. The result
            of each layer is then a view, so this does not work for models that need contiguous
            activations.
    """

    def __init__(self, model: nn.Module, fuse: bool = True) -> None:
        linears = {
            name: module
            for name, module in model.named_modules()
            if type(module) in (nn.Linear, CpuLinear)
        }
        self.groups = _siblings(linears) if fuse else []
        grouped = {id(module) for group in self.groups for module in group}
        self.groups += [[module] for module in linears.values() if id(module) not in grouped]
        self.stale = True

    @staticmethod
    def available(device: torch.device, dtype: torch.dtype) -> bool:
        """Return whether this build of torch has the operators for ``dtype`` on this device."""
        if device.type != "cpu" or not torch.backends.mkldnn.is_available():
            return False
        if dtype == torch.float32:
            return hasattr(torch.ops.mkldnn, "_linear_pointwise")
        return dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())

    def refresh(self) -> None:
        """Pack the weights again if they have changed."""
        if not self.stale:
            return
        for group in self.groups:
            for module in group:
                # frees the old copy before the new one is allocated
                module.__dict__.pop("forward", None)
            for module, forward in zip(group, _packed_forwards(group), strict=True):
                module.forward = _with_adapter(module, forward)  # type: ignore[assignment, method-assign]
        self.stale = False

    def drop(self) -> None:
        """Free the packed copies. The plain forward is used until the next :meth:`refresh`."""
        for group in self.groups:
            for module in group:
                module.__dict__.pop("forward", None)
        self.stale = True


def _siblings(linears: dict[str, nn.Linear]) -> list[list[nn.Linear]]:
    """Return the groups of :data:`_SIBLINGS` that can be computed as one product.

    The layers of a group must have the same input size, and either all of them or none must have a
    bias.
    """
    groups = []
    for name in linears:
        parent, _, own = name.rpartition(".")
        for names in _SIBLINGS:
            group = [linears.get(f"{parent}.{sibling}") for sibling in names]
            present = [module for module in group if module is not None]
            if own != names[0] or len(present) != len(names):
                continue
            if len({(module.in_features, module.bias is None) for module in present}) == 1:
                groups.append(present)
    return groups


Forward = Callable[[torch.Tensor], torch.Tensor]


def _with_adapter(module: nn.Linear, base: Forward) -> Forward:
    """Return the forward of a layer from that of its own weights."""
    if not isinstance(module, LoraLinear):
        return base
    return lambda x: base(x) + module.adapter(x)


def _packed_forwards(group: list[nn.Linear]) -> list[Forward]:
    """Return one forward per layer of a group. The first layer called with an input computes the
    result of all.
    """
    # One product for all layers of the group, packed for oneDNN.
    weight = (
        torch.cat([module.weight.detach() for module in group])
        if len(group) > 1
        else group[0].weight.detach()
    )
    biases = [module.bias.detach() for module in group if module.bias is not None]
    bias = torch.cat(biases) if len(biases) > 1 else biases[0] if biases else None
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS)
    linear = torch.ops.mkldnn._linear_pointwise

    def alone(x: torch.Tensor) -> torch.Tensor:
        return linear(x, packed, bias, "none", [], "")

    if len(group) == 1:
        return [alone]
    # The layers of a group are called with the same input. The first call computes the result of
    # all.
    shared: list[torch.Tensor] = []  # the last input, and the results of all layers for it

    def part(start: int, end: int, last: bool) -> Forward:
        def forward(x: torch.Tensor) -> torch.Tensor:
            if not shared or shared[0] is not x:
                shared[:] = [x, alone(x)]
            result = shared[1][..., start:end]
            # the module calls the layers in order, so nobody needs the result after the last one
            if last:
                shared.clear()
            return result

        return forward

    # Each layer gets its columns of the result.
    forwards = []
    start = 0
    for module in group:
        end = start + module.out_features
        forwards.append(part(start, end, module is group[-1]))
        start = end
    return forwards


# Adapters that requests choose by name (`lora_path`), beside the one that weight updates write.
#
# A request without a name gets what the last update made: the weights and, if there is one, the
# run's own adapter. A request with a name gets the base and the adapter that was loaded under this
# name: of an earlier version, of another run, or one that PEFT has trained. Rows of different
# adapters are computed in one forward. Each linear layer computes its base for all rows at once,
# and each adapter that the step needs for all rows, of which only its own keep the result.


OWN = 0  # the key of rows without a named adapter
MAX_ADAPTERS = 64


@dataclass(frozen=True)
class NamedAdapter:
    """One loaded adapter.

    Attributes:
        key: A number that no other adapter of this engine has had. KV is shared only among rows
            with the same key.
        factors: The factors by the names of their layers, in the dtype and on the device of the
            layers.
        scale: The factor ``s`` of ``s B A x``.
    """

    key: int
    factors: Mapping[str, Factors]
    scale: float

    def __call__(self, layer: str, input: Tensor) -> Tensor:
        """Return ``s B A x``."""
        a, b = self.factors[layer]
        return F.linear(F.linear(input, a) * self.scale, b)


class NamedAdapters:
    """The adapters of one engine by name. All methods run on the model thread."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.loaded: dict[str, NamedAdapter] = {}
        self.hooks: dict[str, RemovableHandle] = {}
        self._last_key = OWN
        # with the rows ``[n, 1]`` of the next forward
        self._active: list[tuple[NamedAdapter, Tensor]] = []
        self._masked = False  # whether the run's own adapter is off for some rows

    def load(self, name: str, settings: LoraSettings, factors: Mapping[str, Factors]) -> None:
        """Load an adapter under a new name.

        Raises:
            WeightError: The name is taken, there are too many adapters, or the factors do not fit
                the model.
        """
        if name in self.loaded:
            raise WeightError(f"an adapter {name!r} is loaded already: unload it first")
        if len(self.loaded) >= MAX_ADAPTERS:
            raise WeightError(f"{len(self.loaded)} adapters are loaded already: unload one first")
        linears = {
            path: module
            for path, module in self.model.named_modules()
            if isinstance(module, nn.Linear)
        }
        fitted = {}
        for path, (a, b) in factors.items():
            module = linears.get(path)
            if module is None:
                raise WeightError(
                    f"the model has no linear layer {path!r}, of which the adapter {name!r} has "
                    "factors"
                )
            shapes = (settings.rank, module.in_features), (module.out_features, settings.rank)
            if (tuple(a.shape), tuple(b.shape)) != shapes:
                raise WeightError(
                    f"the factors of {path} in the adapter {name!r} have the shapes "
                    f"{tuple(a.shape)} and {tuple(b.shape)}, but the layer needs {shapes[0]} and "
                    f"{shapes[1]}"
                )
            fitted[path] = Factors(a.to(module.weight, copy=True), b.to(module.weight, copy=True))
        self._last_key += 1
        self.loaded[name] = NamedAdapter(self._last_key, fitted, settings.scale)
        for path in fitted.keys() - self.hooks.keys():
            self.hooks[path] = linears[path].register_forward_hook(
                functools.partial(self._add, path)
            )

    def unload(self, name: str) -> None:
        """Remove an adapter.

        Raises:
            WeightError: There is no adapter of this name.
        """
        if name not in self.loaded:
            raise WeightError(
                f"an adapter {name!r} does not exist; there are {', '.join(self.loaded) or 'none'}"
            )
        del self.loaded[name]
        used = {path for adapter in self.loaded.values() for path in adapter.factors}
        for path in self.hooks.keys() - used:
            self.hooks.pop(path).remove()

    def key(self, name: str | None) -> int:
        """Return the key for a request.

        Raises:
            BadRequest: There is no adapter of this name.
        """
        if name is None:
            return OWN
        if name not in self.loaded:
            raise BadRequest(
                f"lora_path {name!r} is not loaded; there are {', '.join(self.loaded) or 'none'}"
            )
        return self.loaded[name].key

    @property
    def keys(self) -> list[int]:
        """The keys that rows can have."""
        return [OWN, *(adapter.key for adapter in self.loaded.values())]

    def select(self, keys: Sequence[int], device: torch.device) -> None:
        """Choose the adapter of each row of the next forward, by its key. Without keys, no row has
        a named one.
        """
        self._active = []
        own: Tensor | None = None
        if any(keys):
            of_row = torch.tensor(keys, device=device)[:, None]
            present = set(keys)
            self._active = [
                (adapter, of_row == adapter.key)
                for adapter in self.loaded.values()
                if adapter.key in present
            ]
            own = of_row == OWN
        if own is not None or self._masked:
            for layer in lora_layers(self.model).values():
                layer.lora_rows = own
        self._masked = own is not None

    @contextmanager
    def part(self, module: nn.Module, start: int, end: int, each: bool) -> Iterator[None]:
        """Let the layers inside a module compute the rows ``start`` to ``end - 1`` of the forward
        only.

        Args:
            each: Whether their inputs are a batch of one row each, ``[n, 1, in]``, and not ``[1, n,
                in]``.
        """
        if not self._masked:
            yield
            return

        def cut(rows: Tensor) -> Tensor:
            return rows[start:end, None] if each else rows[start:end]

        active = self._active
        own = [(layer, layer.lora_rows) for layer in lora_layers(module).values()]
        self._active = [(adapter, cut(rows)) for adapter, rows in active]
        for layer, rows in own:
            layer.lora_rows = None if rows is None else cut(rows)
        try:
            yield
        finally:
            self._active = active
            for layer, rows in own:
                layer.lora_rows = rows

    def _add(
        self, path: str, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor
    ) -> Tensor:
        """Add the factors of this layer to the output of its own weights; the hook of each layer
        with factors.
        """
        for adapter, rows in self._active:
            if path in adapter.factors:
                output = torch.where(rows, output + adapter(path, inputs[0]), output)
        return output
