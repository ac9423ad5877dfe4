"""The file of ``--sglang-config``: several served models, or groups of SGLang servers.

It is a YAML file with one or more models. Each has groups of SGLang servers for
prefill, decode or both:

    sglang:
      - name: actor                  # its router is args.sglang_router_ip/port; others: get_model_url(args, name)
        num_gpus_per_engine: 2       # default: --rollout-num-gpus-per-engine
        server_groups:
          - {worker_type: prefill, num_gpus: 2}
          - {worker_type: decode, num_gpus: 4, overrides: {mem_fraction_static: 0.8}}
      - name: judge
        model_path: /models/judge    # default: --hf-checkpoint
        update_weights: false        # default: true if model_path is --hf-checkpoint
        server_groups:
          - {worker_type: regular, num_gpus: 1}

``worker_type`` is regular, prefill, decode, or placeholder, which reserves GPUs without using them.
``overrides`` are options of SGLang by attribute name; they take precedence over ``--sglang-…``
flags.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slime.config.engine import ServedModel, ServerGroup, ServerGroupError
from slime.config.files import form_problems, load_yaml, read_json
from slime.config.passthrough import KEYS
from slime.plugins.sglang.options import SGLANG


def read_server_groups(
    file: str, hf_checkpoint: str, num_gpus_per_engine: int
) -> list[ServedModel]:
    """Read the models of a ``--sglang-config`` file, in the order of the file.

    Raises:
        ServerGroupError: The file is invalid.
        OSError: The file cannot be read.
    """
    try:
        document = load_yaml(Path(file).expanduser())
    except ValueError as error:
        raise ServerGroupError(str(error)) from error
    # The schema says what is wrong in types and names, so the code below can rely on them.
    if problems := form_problems(document, read_json(Path(__file__).with_name("groups.json"))):
        raise ServerGroupError("; ".join(problems))
    models = [_model(entry, hf_checkpoint, num_gpus_per_engine) for entry in document["sglang"]]
    names = [model.name for model in models]
    for name in names:
        if names.count(name) > 1:
            raise ServerGroupError(f"two models have the name {name!r}")
    if not any(model.update_weights for model in models):
        raise ServerGroupError(
            "no model gets the trainer's weights: leave out model_path of one model, or set its "
            "update_weights"
        )
    return models


def _model(entry: dict[str, Any], hf_checkpoint: str, per_engine: int) -> ServedModel:
    where = f"model {str(entry['name'])!r}"
    path = str(entry.get("model_path") or hf_checkpoint)
    per_engine = entry.get("num_gpus_per_engine", per_engine)
    entries = entry.get("server_groups") or entry["engine_groups"]
    groups = tuple(
        _group(group, f"{where}, group {i}", per_engine) for i, group in enumerate(entries, 1)
    )
    # A router speaks either with regular servers or with pairs of prefill and decode servers.
    kinds = {group.worker_type for group in groups} - {"placeholder"}
    if kinds not in ({"regular"}, {"prefill", "decode"}):
        has = ", ".join(sorted(kinds)) or "only placeholders"
        raise ServerGroupError(f"{where} has {has}: use only regular, or prefill and decode")
    return ServedModel(
        str(entry["name"]), path, entry.get("update_weights", path == hf_checkpoint), groups
    )


def _group(entry: dict[str, Any], where: str, per_engine: int) -> ServerGroup:
    kind = entry.get("worker_type", "regular")
    gpus = entry["num_gpus"]
    per_engine = entry.get("num_gpus_per_engine", per_engine)
    if gpus % per_engine and kind != "placeholder":
        raise ServerGroupError(
            f"{where}: num_gpus {gpus} is not a multiple of num_gpus_per_engine {per_engine}"
        )
    overrides = {
        str(name).replace("-", "_"): value for name, value in (entry.get("overrides") or {}).items()
    }
    # What is refused as a flag is refused here as well.
    for name in overrides:
        if name in KEYS:
            flag_name = f"--sglang-{name.replace('_', '-')}"
            raise ServerGroupError(
                f"{where}: overrides: all servers have the same {name}: use {flag_name}"
            )
        if reason := SGLANG.reasons["not supported"].get(name):
            raise ServerGroupError(f"{where}: overrides: {name} is not supported: {reason}")
    return ServerGroup(kind, gpus, per_engine, overrides)
