"""``--sglang-config``: several models, and groups of SGLang servers that prefill, decode or do both.

    sglang:
      - name: actor                  # its router is args.sglang_router_ip/port; others: get_model_url(args, name)
        num_gpus_per_engine: 2       # default: --rollout-num-gpus-per-engine
        server_groups:
          - {worker_type: prefill, num_gpus: 2}
          - {worker_type: decode, num_gpus: 4, overrides: {mem_fraction_static: 0.8}}
      - name: judge
        model_path: /models/judge    # default: --hf-checkpoint
        update_weights: false        # default: where model_path is --hf-checkpoint
        server_groups:
          - {worker_type: regular, num_gpus: 1}

``worker_type`` is regular, prefill, decode, or placeholder, which leaves GPUs free. ``overrides`` are options of
SGLang by attribute name; they win over ``--sglang-…``.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from slime.config.passthrough import REFUSED
from slime.config.yaml_file import load_yaml

WorkerType = Literal["regular", "prefill", "decode", "placeholder"]
WORKER_TYPES: tuple[str, ...] = get_args(WorkerType)
DEFAULT_MODEL = "default"  # the only one, without --sglang-config
_MODEL_KEYS = ("name", "model_path", "update_weights", "num_gpus_per_engine", "server_groups", "engine_groups")
_GROUP_KEYS = ("worker_type", "num_gpus", "num_gpus_per_engine", "overrides")


class ServerGroupError(ValueError):
    """The file is wrong; the message says where and what to change, without the name of the file."""


@dataclass(frozen=True)
class ServerGroup:
    """Servers of one kind."""

    worker_type: WorkerType
    num_gpus: int
    num_gpus_per_engine: int
    overrides: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ServedModel:
    """One model behind one router."""

    name: str
    model_path: str
    update_weights: bool
    groups: tuple[ServerGroup, ...]


def read_server_groups(file: str, hf_checkpoint: str, num_gpus_per_engine: int) -> list[ServedModel]:
    """The models of a ``--sglang-config`` file, in its order.

    Raises:
        ServerGroupError: as the name says.
        OSError: it cannot be read.
    """
    try:
        document = load_yaml(Path(file).expanduser())
    except ValueError as error:
        raise ServerGroupError(str(error)) from error
    entries = document.get("sglang") if isinstance(document, dict) else None
    if not isinstance(entries, list) or not entries:
        raise ServerGroupError("needs a list of models under the key 'sglang'")
    models = [_model(entry, f"model {i}", hf_checkpoint, num_gpus_per_engine) for i, entry in enumerate(entries, 1)]
    names = [model.name for model in models]
    for name in names:
        if names.count(name) > 1:
            raise ServerGroupError(f"two models have the name {name!r}")
    if not any(model.update_weights for model in models):
        raise ServerGroupError(
            "no model gets the trainer's weights: leave model_path out of one, or set update_weights"
        )
    return models


def simple_groups(model_path: str, num_gpus: int, num_gpus_per_engine: int, prefill_servers: int) -> list[ServedModel]:
    """One model without a file: ``--rollout-num-gpus`` in engines, the first ``prefill_servers`` only prefill."""
    prefill = prefill_servers * num_gpus_per_engine
    groups = [ServerGroup("decode" if prefill else "regular", num_gpus - prefill, num_gpus_per_engine)]
    if prefill:
        groups.insert(0, ServerGroup("prefill", prefill, num_gpus_per_engine))
    return [ServedModel(DEFAULT_MODEL, model_path, True, tuple(groups))]


def total_gpus(models: list[ServedModel]) -> int:
    """GPUs of all groups, placeholders with them."""
    return sum(group.num_gpus for model in models for group in model.groups)


def _model(entry: Any, where: str, hf_checkpoint: str, per_engine: int) -> ServedModel:
    _check_keys(entry, _MODEL_KEYS, where)
    name = str(entry.get("name") or "")
    if not name:
        raise ServerGroupError(f"{where} has no name")
    where = f"model {name!r}"
    path = str(entry.get("model_path") or hf_checkpoint)
    groups = entry.get("server_groups") or entry.get("engine_groups")
    if not isinstance(groups, list) or not groups:
        raise ServerGroupError(f"{where} has no server_groups")
    per_engine = _count(entry.get("num_gpus_per_engine", per_engine), f"{where}: num_gpus_per_engine")
    made = tuple(_group(group, f"{where}, group {i}", per_engine) for i, group in enumerate(groups, 1))
    kinds = {group.worker_type for group in made} - {"placeholder"}
    if not kinds:
        raise ServerGroupError(f"{where} has placeholders only")
    if kinds not in ({"regular"}, {"prefill", "decode"}):
        raise ServerGroupError(f"{where} has {', '.join(sorted(kinds))}: either all regular, or prefill and decode")
    return ServedModel(name, path, bool(entry.get("update_weights", path == hf_checkpoint)), made)


def _group(entry: Any, where: str, per_engine: int) -> ServerGroup:
    _check_keys(entry, _GROUP_KEYS, where)
    kind = entry.get("worker_type", "regular")
    if kind == "encoder":
        raise ServerGroupError(f"{where}: encoder servers are not built; regular servers encode images themselves")
    if kind not in WORKER_TYPES:
        raise ServerGroupError(f"{where}: worker_type {kind!r} is none of {', '.join(WORKER_TYPES)}")
    gpus = _count(entry.get("num_gpus"), f"{where}: num_gpus")
    per_engine = _count(entry.get("num_gpus_per_engine", per_engine), f"{where}: num_gpus_per_engine")
    if gpus % per_engine and kind != "placeholder":
        raise ServerGroupError(f"{where}: num_gpus {gpus} is no multiple of num_gpus_per_engine {per_engine}")
    overrides = entry.get("overrides") or {}
    if not isinstance(overrides, dict):
        raise ServerGroupError(f"{where}: overrides needs names and values, e.g. {{mem_fraction_static: 0.8}}")
    named = {str(name).replace("-", "_"): value for name, value in overrides.items()}
    for name in named:
        if name in REFUSED:
            raise ServerGroupError(f"{where}: overrides: {name} is not supported: {REFUSED[name]}")
    return ServerGroup(kind, gpus, per_engine, named)


def _check_keys(entry: Any, known: tuple[str, ...], where: str) -> None:
    if not isinstance(entry, dict):
        raise ServerGroupError(f"{where} needs keys and values, not {entry!r}")
    for key in entry:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            raise ServerGroupError(f"{where}: unknown key {key!r}" + (f"; did you mean {near[0]!r}?" if near else ""))


def _count(value: Any, what: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ServerGroupError(f"{what} needs a whole number of at least 1, not {value!r}")
    return value
