"""Read and write adapters in the format of PEFT: ``adapter_config.json`` and
``adapter_model.safetensors``.

See https://huggingface.co/docs/peft/developer_guides/checkpoint. The name of a factor is that of
its module in memory between ``base_model.model.`` and ``.lora_A.weight`` or ``.lora_B.weight``.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from slime.models.lora import LoraSettings
from slime.models.shards import ModelError, shorten

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_MOST_ALPHA = 1e9  # far above any of a run; with 1e308, merged weights would be infinite
_MOST_RANK = 2**16
_DTYPES = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
_CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq")
_FACTORS = {"lora_A.weight": 0, "lora_B.weight": 1}


class Factors(NamedTuple):
    """The factors of one layer."""

    a: Tensor
    """``[rank, in]``"""
    b: Tensor
    """``[out, rank]``"""


Adapter = Mapping[str, Factors]
"""The factors by the name of their module."""


def is_adapter(path: str | Path | None) -> bool:
    """Return whether a folder has an adapter in the format of PEFT."""
    return path is not None and (Path(path).expanduser() / CONFIG).is_file()


def peft_config(settings: LoraSettings, targets: Sequence[str], base: str) -> dict[str, Any]:
    """Return the content of ``adapter_config.json``, as PEFT's ``LoraConfig`` writes it.

    Args:
        targets: The names of the modules with adapters, or the last parts of their names.
        base: The folder or hub id of the model.
    """
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": None,
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "lora_dropout": settings.dropout,
        "use_rslora": settings.rslora,
        "use_dora": False,
        "target_modules": list(targets),
        "exclude_modules": None,
        "modules_to_save": None,
        "layers_to_transform": None,
        "layers_pattern": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def named_factors(adapter: Adapter) -> dict[str, Tensor]:
    """Return the factors by their names in the file."""
    return {
        name: factor
        for module, factors in adapter.items()
        for name, factor in zip(factor_names(module), factors, strict=True)
    }


def factor_names(module: str) -> tuple[str, str]:
    """Return the names of the factors of a module in the file."""
    a, b = (f"{_PREFIX}{module}.{name}" for name in _FACTORS)
    return a, b


def write_adapter(folder: Path, config: Mapping[str, Any], adapter: Adapter) -> None:
    """Write an adapter. The folder is created."""
    folder.mkdir(parents=True, exist_ok=True)
    write_factors(folder, config, named_factors(adapter))


def write_factors(folder: Path, config: Mapping[str, Any], factors: Mapping[str, Tensor]) -> None:
    """Write an adapter whose factors have their names in the file."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in factors.items()}
    save_file(tensors, str(folder / WEIGHTS), metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _regular(folder: str | Path, name: str) -> Path:
    """Return a file of an adapter, unless it is a pipe or a device, which would be read for
    ever.
    """
    path = Path(folder).expanduser() / name
    if path.exists() and not path.is_file():
        raise ModelError(f"{path} cannot be read: it is not a regular file")
    return path


def read_config(folder: str | Path) -> tuple[LoraSettings, dict[str, Any]]:
    """Read ``adapter_config.json``, and return the shape of the adapter and the whole content.

    Raises:
        ModelError: The file is damaged, or the adapter has a form that slime does not support.
    """
    path = _regular(folder, CONFIG)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        targets = config["target_modules"]
        settings = LoraSettings(
            rank=operator.index(config["r"]),
            alpha=float(config["lora_alpha"]),
            dropout=float(config.get("lora_dropout") or 0.0),
            rslora=bool(config.get("use_rslora")),
            targets=(targets,) if isinstance(targets, str) else tuple(targets),
            exclude=tuple(config.get("exclude_modules") or ()),
        )
        names = (*settings.targets, *settings.exclude)
        sound = (
            0 < settings.alpha <= _MOST_ALPHA
            and 0 <= settings.dropout < 1
            and all(isinstance(n, str) for n in names)
        )
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        raise ModelError(
            f"{path} cannot be read: {type(error).__name__}: {error}"[:2000]
        ) from error
    if not sound:
        raise ModelError(
            f"{path} has values that cannot be right: see lora_alpha, lora_dropout and "
            "target_modules"
        )
    other = other_forms(config)
    if other or not 1 <= settings.rank <= _MOST_RANK:
        what = ", ".join(other) or f"rank {settings.rank}"
        raise ModelError(
            f"{path} has {what}, which slime does not support: use plain LoRA with one rank"
        )
    return settings, config


def other_forms(config: Mapping[str, object]) -> list[str]:
    """Return what ``adapter_config.json`` has besides plain LoRA with one rank, which slime does
    not support.
    """
    other = [
        name
        for name in ("rank_pattern", "alpha_pattern", "modules_to_save", "use_dora")
        if config.get(name)
    ]
    plain = {"bias": "none", "peft_type": "LORA"}
    other += [
        f"{name} {config[name]!r}"
        for name, value in plain.items()
        if config.get(name, value) != value
    ]
    init = config.get("init_lora_weights")
    # With these, PEFT changes the base weights before it loads the factors.
    return other + (
        [f"init_lora_weights {init!r}"] if str(init).lower().startswith(_CHANGE_THE_BASE) else []
    )


def read_factors(folder: str | Path, rank: int) -> dict[str, Factors]:
    """Read ``adapter_model.safetensors``.

    Args:
        rank: The rank in ``adapter_config.json``.

    Raises:
        ModelError: The file is missing or damaged, or has other tensors than the factors of linear
            layers, of another rank, or with values that are not finite.
    """
    path = _regular(folder, WEIGHTS)
    try:
        tensors = load_file(str(path))
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} cannot be read: {error}"[:2000]) from error
    return factors_of(tensors, rank, str(path))


def factors_of(tensors: Mapping[str, Tensor], rank: int, where: str) -> dict[str, Factors]:
    """Return the pairs of factors by the names of their modules.

    Args:
        tensors: The factors by their names in the file.
        rank: The rank in the settings of the adapter.
        where: Where they come from, for error messages.

    Raises:
        ModelError: There are other tensors than the factors of linear layers, of another rank, or
            with values that are not finite.
    """
    modules: dict[str, list[Tensor | None]] = {}
    unknown = []
    for name, tensor in tensors.items():
        module, _, factor = name.removeprefix(_PREFIX).rpartition(".lora_")
        index = _FACTORS.get(f"lora_{factor}")
        if index is None or not name.startswith(_PREFIX) or tensor.dim() != 2:
            unknown.append(name)
        else:
            modules.setdefault(module, [None, None])[index] = tensor
    found = {
        name: Factors(a, b) for name, (a, b) in modules.items() if a is not None and b is not None
    }
    unknown += [name for name in modules if name not in found]
    if unknown or not found:
        raise ModelError(
            f"{where} has tensors that are not pairs of factors of linear layers: "
            f"{shorten(unknown)}"
        )
    for name, (a, b) in found.items():
        if a.shape[0] != rank or b.shape[1] != rank or not (a.numel() and b.numel()):
            shapes = f"{list(a.shape)} and {list(b.shape)}"
            raise ModelError(
                f"{where}: the factors of {name} have shapes {shapes}, but its settings have rank "
                f"{rank}"
            )
        if not all(x.dtype in _DTYPES and x.isfinite().all() for x in (a, b)):
            raise ModelError(
                f"{where}: the factors of {name} must be finite numbers of 16, 32 or 64 bits"
            )
    return found
