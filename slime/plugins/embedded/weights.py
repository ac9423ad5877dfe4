"""Load, hash and compare the weights of a model by the tensor names of its checkpoint, and release
its memory.
"""

from __future__ import annotations

import difflib
import gc
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from slime.engines.payload import NamedTensor
from slime.models.digest import tensor_digest
from slime.models.fp8 import DTYPE as FP8
from slime.models.fp8 import block_sizes, dequantize
from slime.models.lora import lora_layers
from slime.models.peft_files import factor_names
from slime.models.shards import ModelError
from slime.models.stored import StoredWeights
from slime.plugins.embedded.served import WeightError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from slime.plugins.embedded.runner import Runner


SCALE_ENDINGS = (".weight_scale_inv", ".weight_scale")


class Weights:
    """Views of a model's parameters, by the names of the tensors in the checkpoint.

    transformers may keep several tensors of a checkpoint in one parameter (for example the experts
    of a layer). Each name maps to a view of the parameter, so an update writes only that part, in
    place.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.snapshot: dict[str, torch.Tensor] | None = None
        self.aliases: dict[str, str] = {}
        self.views: dict[str, torch.Tensor] = {}
        self.find_views()
        self.scales: dict[str, torch.Tensor] = {}
        """The scales of quantized weights whose values have not arrived yet, by the name of the
        weight.
        """
        self.stale: set[str] = set()
        """The tensors not yet written again after an update failed halfway. While there are any,
        the weights of the model belong to no version."""

    def find_views(self) -> None:
        """Find the views again, after layers have got adapters. The factors have their names in
        PEFT's files.
        """
        layers = lora_layers(self.model)
        names = {key: factor_names(key) for key in layers}
        self.factors = {names[key][0]: layer.lora_A.data for key, layer in layers.items()}
        self.factors |= {names[key][1]: layer.lora_B.data for key, layer in layers.items()}
        self.aliases.clear()
        self.views = {**self._checkpoint_views(), **self.factors}

    def _checkpoint_views(self) -> dict[str, torch.Tensor]:
        views: dict[str, torch.Tensor] = {}
        seen: dict[tuple[int, int], str] = {}
        for name, parameter in self.model.state_dict(keep_vars=False).items():
            if name.endswith((".lora_A", ".lora_B")):
                continue
            place = (parameter.data_ptr(), parameter.numel())
            # tied parameters are one tensor on disk, with the first name
            if parameter.numel() and place in seen:
                self.aliases[name] = seen[place]
                continue
            seen[place] = name
            views[name] = parameter
        return _on_disk_views(self.model, views)

    def resolve(self, name: str) -> torch.Tensor:
        """Return the tensor for a name in the checkpoint.

        Raises:
            WeightError: There is no such name.
        """
        view = self.views.get(self.aliases.get(name, name))
        if view is None:
            near = difflib.get_close_matches(name, self.views, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise WeightError(f"the model has no tensor {name!r}{hint}")
        return view

    @torch.no_grad()
    def load(self, tensors: Iterable[NamedTensor]) -> int:
        """Copy tensors into the model, and return their number.

        Weights that arrive as 8-bit floats are dequantized. Their scales must come first, in the
        same call or an earlier one.

        Raises:
            WeightError: A name or shape is wrong. In this case nothing is written.
        """
        pairs = [
            (name, self.resolve(name), tensor, scales)
            for name, tensor, scales in self._with_scales(tensors)
        ]
        # All shapes are checked before the first copy, so that an invalid request does not mix two
        # versions.
        for name, view, tensor, _ in pairs:
            if view.shape != tensor.shape:
                raise WeightError(
                    f"{name!r} has shape {tuple(tensor.shape)}, but the model has "
                    f"{tuple(view.shape)}"
                )
        for name, view, tensor, scales in pairs:
            view.copy_(tensor if scales is None else dequantize(tensor, scales))
            self.stale.discard(self.aliases.get(name, name))
        return len(pairs)

    def _with_scales(
        self, tensors: Iterable[NamedTensor]
    ) -> Iterator[tuple[str, torch.Tensor, torch.Tensor | None]]:
        """Yield the weights, those that are quantized with their scales, and keep scales for the
        values that follow.
        """
        for name, tensor in tensors:
            if tensor.dtype == FP8:
                scales = self.scales.pop(name, None)
                if scales is None:
                    raise WeightError(
                        f"{name!r} is quantized, but its scales did not arrive before it"
                    )
                try:
                    block_sizes(tensor.shape, scales.shape)
                except ValueError as error:
                    raise WeightError(f"{name!r}: {error}") from error
                yield name, tensor, scales
            elif name not in self.views and name.endswith(SCALE_ENDINGS):
                weight = name.removesuffix("_inv").removesuffix("_scale")
                self.resolve(weight)
                # the memory of the request is given back before the values come
                self.scales[weight] = tensor.clone()
            else:
                yield name, tensor, None

    load_weights = load  # the name that custom weight loaders use

    def load_folder(self, folder: Path) -> int:
        """Load all tensors of the safetensors files in a Hugging Face folder, and return their
        number.

        Quantized tensors are dequantized. Before anything is written, names, shapes and dtypes of
        all files are compared with the model, and all values are read once: the second reading
        comes from the page cache. So a folder that is refused changes nothing. If the second
        reading fails all the same, because somebody changed the files, :attr:`stale` has the
        tensors that were not written, until updates have written them.

        Raises:
            WeightError: A file is damaged, tensors of the model are missing, tensors have another
                shape, or values are not finite.
        """
        try:
            stored = StoredWeights(folder)
        except (ModelError, OSError) as error:
            raise WeightError(str(error)) from error
        names = self._require_all(stored)
        try:
            for name in names:
                stored.get(name)
        except Exception as error:  # safetensors and the kernel have errors of their own
            raise WeightError(
                f"the update from {str(folder)!r} was refused, nothing is changed: {error}"
            ) from error
        self.stale |= set(names.values())
        for factor in self.factors.values():  # the weights of a whole model have no adapter
            factor.zero_()
        try:
            for name in names:
                self.load([(name, stored.get(name))])
        except Exception as error:
            raise WeightError(
                f"the update from {str(folder)!r} failed ({error}): {len(self.stale)} of "
                f"{len(self.views)} tensors still have old values, and the engine generates "
                "nothing until an update has written them"
            ) from error
        return len(names)

    def _require_all(self, stored: StoredWeights) -> dict[str, str]:
        """Check that a folder has all weights of the model, and return the name of the view for
        each stored tensor.
        """
        shapes = stored.shapes()
        where = str(stored.folder)
        names = {name: self.aliases.get(name, name) for name in shapes}
        names = {name: view for name, view in names.items() if view in self.views}
        stored_views = set(names.values())
        known = stored_views | set(self.factors)
        missing = sorted(
            name for name in self.views if name not in known and _is_weight(self.model, name)
        )
        if missing:
            raise WeightError(
                f"{where!r} lacks {len(missing)} tensors of the model, e.g. {missing[0]!r}"
            )
        for name, view in names.items():
            if shapes[name] != tuple(self.views[view].shape):
                raise WeightError(
                    f"{name!r} has shape {shapes[name]}, but the model "
                    f"{tuple(self.views[view].shape)}"
                )
            if self.views[view].is_floating_point() and not stored.is_float(name):
                raise WeightError(
                    f"{name!r} in {where!r} is {stored.plain[name].dtype}, but the model has floats"
                )
        return names

    def get(self, name: str, truncate: int) -> list[object]:
        view = self.resolve(name)
        view = view if view.dim() else view[None]
        return list(view[:truncate].float().tolist())

    def checksums(self) -> dict[str, str]:
        """Return the XXH3-128 of the bytes of each tensor, in the dtype of the engine."""
        return {name: tensor_digest(view) for name, view in self.views.items()}

    def take_snapshot(self) -> None:
        self.snapshot = {name: view.detach().cpu().clone() for name, view in self.views.items()}

    @torch.no_grad()
    def reset(self) -> None:
        """Fill all floating-point tensors with noise, so that :meth:`compare` shows tensors that no
        update wrote.
        """
        generator = torch.Generator().manual_seed(0)
        for view in self.views.values():
            if view.is_floating_point():
                view.copy_(torch.randn(view.shape, generator=generator))

    def compare(self) -> list[str]:
        """Return the names of the tensors that differ from the snapshot, and drop the snapshot.

        Raises:
            WeightError: There is no snapshot.
        """
        if self.snapshot is None:
            raise WeightError(
                "there is no snapshot to compare with; use the action 'snapshot' first"
            )
        snapshot = self.snapshot
        self.snapshot = None
        return [
            name
            for name, view in self.views.items()
            if not torch.equal(view.detach().cpu(), snapshot[name])
        ]


def _is_weight(model: PreTrainedModel, name: str) -> bool:
    """Return whether a checkpoint must contain a tensor. Buffers need not be in it, because the
    model computes them.
    """
    return name not in {key for key, _ in model.named_buffers()}


def _on_disk_views(
    model: PreTrainedModel, views: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Rename and split parameters as ``save_pretrained`` does, but as views.

    If the reverse conversion of transformers does more than rename, it is applied to a tensor that
    contains the flat index of each element. The resulting indices give the offset and strides of
    each part, if it is a regular part.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, revert_weight_conversion

    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:
        conversions = get_model_conversion_mapping(model, add_legacy=False)
    if not conversions:
        return views
    converters = [
        entry.reverse_transform() for entry in conversions if isinstance(entry, WeightConverter)
    ]
    result: dict[str, torch.Tensor] = {}
    for name, parameter in views.items():
        if any(converter.rename_source_key(name)[1] is not None for converter in converters):
            numbers = torch.arange(parameter.numel()).view(parameter.shape)
            parts = revert_weight_conversion(model, {name: numbers})
            result.update(
                {disk: _strided_view(disk, parameter, part) for disk, part in parts.items()}
            )
        else:
            (disk,) = revert_weight_conversion(model, {name: torch.empty(0)})
            result[disk] = parameter
    return result


def _strided_view(name: str, parameter: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Return the view of ``parameter`` whose elements have the flat indices ``numbers``.

    Raises:
        WeightError: No strides describe these indices.
    """
    flat = parameter.view(-1)
    if numbers.numel() == 0:
        return parameter
    offset = int(numbers.reshape(-1)[0])
    strides = []
    for axis in range(numbers.dim()):
        step = (
            numbers.select(axis, 1) - numbers.select(axis, 0)
            if numbers.shape[axis] > 1
            else torch.zeros(1).long()
        )
        strides.append(int(step.reshape(-1)[0]))
    expected = torch.arange(flat.numel()).as_strided(numbers.shape, strides, offset)
    if not torch.equal(expected, numbers):
        raise WeightError(
            f"tensor {name!r} is not a regular part of a parameter, so it cannot be updated in "
            "place"
        )
    return flat.as_strided(numbers.shape, strides, flat.storage_offset() + offset)


TAGS = ("weights", "kv_cache", "cuda_graph")
"""CUDA graphs are dropped with any of them, because they have the addresses of all."""


class Memory:
    """Releases memory by tag.

    Weights are not lost. On CUDA they are moved to pinned host memory and come back unchanged. On
    the CPU only their packed copies are freed.
    """

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.released: set[str] = set()
        self._host: dict[str, torch.Tensor] = {}

    def release(self, tags: list[str]) -> None:
        new = set(tags) - self.released
        if "kv_cache" in new:
            self.runner.cache.clear()
        if "weights" in new:
            if self.runner.packed is not None:
                self.runner.packed.drop()
            if self.runner.device.type == "cuda":
                self._to_host()
        if self.runner.graphs is not None:
            self.runner.graphs.drop()
        self.released |= new
        gc.collect()
        if self.runner.device.type == "cuda":
            torch.cuda.empty_cache()

    def resume(self, tags: list[str]) -> None:
        back = set(tags) & self.released
        if "weights" in back and self._host:
            self._to_device()
        self.released -= back

    def _storages(self) -> dict[str, torch.UntypedStorage]:
        """Return the storages of the model, each of them once, because tied tensors share a
        storage.

        Resizing a storage keeps all views into it valid, so no tensor of the model has to be
        replaced.
        """
        model = self.runner.model
        tensors = [*model.named_parameters(), *model.named_buffers()]
        unique = {tensor.untyped_storage()._cdata: (name, tensor) for name, tensor in tensors}
        return {name: tensor.untyped_storage() for name, tensor in unique.values()}

    def _to_host(self) -> None:
        for name, storage in self._storages().items():
            flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            host = torch.empty(flat.numel(), dtype=torch.uint8, pin_memory=True)
            host.copy_(flat, non_blocking=True)
            self._host[name] = host
        # the copies must be complete before the storages are freed
        torch.cuda.synchronize(self.runner.device)
        for storage in self._storages().values():
            storage.resize_(0)

    def _to_device(self) -> None:
        for name, storage in self._storages().items():
            host = self._host[name]
            storage.resize_(host.numel())
            flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            flat.copy_(host, non_blocking=True)
        torch.cuda.synchronize(self.runner.device)
        self._host.clear()
