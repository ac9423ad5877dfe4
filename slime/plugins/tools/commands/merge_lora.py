"""``slime merge-lora``: write the model that an adapter and its base are together."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from slime.cli.command import CommandError, writing
from slime.types import JsonObject

from . import Subparsers

if TYPE_CHECKING:
    from slime.models.lora import LoraSettings
    from slime.models.peft_files import Factors
    from slime.plugins.megatron.maps import Layout

Found = tuple["LoraSettings", Mapping[str, "Factors"], str]
"""The shape of an adapter, its factors, and the base that it names; empty if it names none."""


def add_merge_lora(commands: Subparsers) -> None:
    merge = commands.add_parser(
        "merge-lora",
        help="write the model that a LoRA adapter and its base are together",
        description="Prints the folder of the merged model as the last line of stdout.",
    )
    merge.add_argument(
        "adapter",
        type=Path,
        help="folder with adapter_config.json (--save-hf), or a snapshot iter_*",
    )
    merge.add_argument(
        "--base", help="folder or hub id of the base (default: the one that the adapter names)"
    )
    merge.add_argument(
        "--output-dir", type=Path, required=True, help="folder to write, which must not exist"
    )
    merge.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> None:
    print(merge_lora(args.adapter, args.base, args.output_dir))


def merge_lora(adapter: Path, base: str | None, output: Path) -> Path:
    """Merge an adapter of PEFT's format or of a snapshot into its base, and write a Hugging Face
    folder.

    The sums are computed in float32 and stored in the dtype of the base. The whole base is in
    memory.

    Args:
        adapter: A folder of ``--save-hf`` or PEFT, or a snapshot ``iter_*``.
        base: The folder or hub id of the base; None for the one that the adapter names.
        output: The folder to write, which must not exist.

    Raises:
        CommandError: The folder has no adapter, the adapter does not fit the base, or ``output``
            exists.
    """
    import torch

    from slime.backends.fsdp.hf_weights import save_hf_checkpoint
    from slime.models.loading import load_hf_config, load_hf_model
    from slime.models.lora import attach
    from slime.models.lora_experts import load_expert_lora
    from slime.models.shards import ModelError

    if output.exists():
        raise CommandError(f"{output} exists already: name another folder")
    # The adapter, and the base that it names or that the caller gives.
    try:
        settings, factors, named = _read(adapter)
        path = base or named
        if not path:
            raise CommandError(f"{adapter} does not name its base: pass --base")
        dtype = getattr(load_hf_config(path), "dtype", None) or torch.bfloat16
        model = load_hf_model(path, dtype, "cpu")
    except ModelError as error:
        raise CommandError(str(error)) from error
    except OSError as error:  # of transformers: neither a folder nor a model that the hub gives
        raise CommandError(f"the base {path} cannot be read: {error}") from error
    # Experts in one tensor are merged where they are; the factors of all other layers must fit a
    # linear layer.
    modules = model.named_modules()
    linears = {name: one for name, one in modules if isinstance(one, torch.nn.Linear)}
    try:
        experts = load_expert_lora(model, factors, settings)
    except ModelError as error:
        raise CommandError(f"{path} is not the base of {adapter}: {error}") from error
    for name, (a, b) in factors.items():
        if name in experts:
            continue
        if name not in linears:
            problem = f"it has no linear layer {name}"
        elif (shape := tuple(linears[name].weight.shape)) != (wanted := (b.shape[0], a.shape[1])):
            problem = f"{name} has the shape {shape}, but the adapter is for {wanted}"
        else:
            attach(linears[name], a, b, settings)
            continue
        raise CommandError(f"{path} is not the base of {adapter}: {problem}")
    with writing(output):
        save_hf_checkpoint(model, output, dtype, path, writer=True)
    return output


def _read(folder: Path) -> Found:
    from slime.models.peft_files import is_adapter, read_config, read_factors

    if is_adapter(folder):
        settings, config = read_config(folder)
        return (
            settings,
            read_factors(folder, settings.rank),
            str(config.get("base_model_name_or_path") or ""),
        )
    file = folder / "actor" / "trainer.json"
    meta = _meta(file) if file.is_file() else {}
    stored = meta.get("lora")
    if not isinstance(stored, dict):
        raise CommandError(
            f"{folder} has no adapter: name a folder with adapter_config.json, or a snapshot iter_*"
        )
    of_megatron = meta.get("format") == "megatron"
    tensors, prefix = ("torch_dist", "") if of_megatron else ("dcp", "model/")
    try:
        layouts = _layouts(meta) if of_megatron else {}
        return _of_snapshot(file.parent / tensors, prefix, stored, layouts)
    except (OSError, ValueError, LookupError, TypeError, RuntimeError) as error:
        raise CommandError(f"{folder} is damaged: {type(error).__name__}: {error}") from error


def _layouts(meta: JsonObject) -> dict[str, Layout]:
    """Return the layouts of the rows of ``B`` in a snapshot of Megatron, by the names of linear
    layers.
    """
    from slime.plugins.megatron.maps.family import get_family, projection_layouts

    # Megatron stores the rows of fused layers in an order of its own.
    settings = meta["settings"]
    entries = get_family(str(meta["model_type"])).entries(
        settings if isinstance(settings, dict) else {}
    )
    return {
        name.removesuffix(".weight"): layout
        for entry in entries
        # the other linear layers divide their input features, so that B is whole
        if entry.layout.axis == 0 and not entry.experts
        for name, layout in zip(entry.hf, projection_layouts(entry), strict=True)
    }


def _meta(file: Path) -> JsonObject:
    try:
        meta = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CommandError(f"{file} cannot be read: {error}") from error
    return meta if isinstance(meta, dict) else {}


def _of_snapshot(
    folder: Path, prefix: str, stored: Mapping[str, object], layouts: Mapping[str, Layout]
) -> Found:
    """Read the factors in a snapshot, whose names begin with ``prefix``. ``B`` may have several
    axes of rows, after that of the experts if it has one, and its rows may have one of
    ``layouts``."""
    import torch

    from slime.backends.tensor_shards import StoredTensors, TensorShard
    from slime.models.lora import LoraSettings
    from slime.models.lora_experts import is_expert_module, per_expert
    from slime.models.peft_files import Factors

    # The factors alone are read: the optimizer's state has tensors of the same names.
    tensors = StoredTensors(folder)
    modules = [
        name.removesuffix(".lora_A")
        for name in tensors.shapes
        if name.endswith(".lora_A")
        and name.startswith(prefix)
        and not name.startswith(("optimizer", "copy"))
    ]
    names = [f"{module}.lora_{factor}" for module in modules for factor in "AB"]
    shapes = {name: tensors.shapes[name] for name in names}
    values = {
        name: torch.empty(shape, dtype=tensors.dtypes[name]) for name, shape in shapes.items()
    }
    tensors.read(
        [TensorShard(name, x, (0,) * x.dim(), tuple(x.shape)) for name, x in values.items()]
    )
    factors: dict[str, Factors] = {}
    for module in modules:
        name = module.removeprefix(prefix)
        a = values[f"{module}.lora_A"]
        b = values[f"{module}.lora_B"]
        if is_expert_module(name):
            factors |= per_expert(name, a, b.flatten(1, -2))
        else:
            (b,) = layouts[name].split(b) if name in layouts else (b,)
            factors[name] = Factors(a, b.flatten(0, -2))
    settings = LoraSettings(
        int(str(stored["rank"])), float(str(stored["alpha"])), rslora=bool(stored["rslora"])
    )
    return settings, factors, str(stored["base"])
