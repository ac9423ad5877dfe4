"""The options of SGLang's servers and of its router that the user may give, those that slime refuses,
which flags exclude or need each other with SGLang, and the file of ``--sglang-config``.

That is a YAML file with one or more served models. Each has groups of SGLang servers for prefill, decode
or both:

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

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.config.engine import (
    OUTER_CACHE,
    ServedModel,
    ServerGroup,
    ServerGroupError,
    outer_caches,
    readable_models,
    shared_groups,
)
from slime.config.files import form_problems, load_yaml, read_json
from slime.config.passthrough import KEYS, ProgramOptions
from slime.config.rules import RuleSet, Run

if TYPE_CHECKING:
    from slime.config.args import Args


_HERE = Path(__file__).parent
_REFUSED = read_json(_HERE / "refused.json")
SGLANG = ProgramOptions(
    (_HERE / "options-0.5.23.json", _HERE / "options-0.5.15.post1.json"), _REFUSED["sglang"]
)
ROUTER = ProgramOptions(
    (_HERE / "router.json",),
    _REFUSED["router"],
    {
        "policy": "cache_aware",
        "balance_abs_threshold": 10,
        "balance_rel_threshold": 1.2,
        "log_level": "warn",
        # The circuit breaker counts 4xx responses as failures, so a series of invalid requests
        # excludes all engines. The timeout is short, so that this lasts seconds and not a minute.
        # The price: a bad engine is tried again sooner, which costs a few retries each time.
        "cb_timeout_duration_secs": 5,
    },
)


def keyless_options(given: Mapping[str, object]) -> list[str]:
    """Return those of ``given`` SGLang options with which SGLang accepts no keys, as flags."""
    found = [name for name in ("grpc_port", "grpc_mode", "smg_grpc_mode") if given.get(name)]
    if int(str(given.get("tokenizer_worker_num") or 1)) > 1:
        found.append("tokenizer_worker_num")
    return [f"--sglang-{name.replace('_', '-')}" for name in found]


def check_keys(args: Args) -> list[str]:
    """Report keys of servers with which requests would fail, and engines that have no key."""
    options = ", ".join(keyless_options(args.sglang))
    if args.rollout_backend != "sglang" or not options:
        return []
    if args.sglang.get("api_key") or args.sglang.get("admin_api_key"):
        return [f"--sglang-api-key, --sglang-admin-api-key: SGLang accepts no key with {options}"]
    args.notices.append(
        f"{options}: the engines have no key, so everyone who reaches their ports can use them"
    )
    return []


SGLANG_FAMILIES = ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
"""Architectures of which SGLang quantizes exactly the projections that slime sends as 8-bit
floats.
"""
_NO_SCALES = ("LlamaForCausalLM", "MistralForCausalLM")
"""Architectures of which SGLang (0.5.15 and 0.5.23) loads no scales of blocks: it renames them to
those of tensors, and ignores names that it does not know. The scales would keep the values of
uninitialized memory."""


def _outer_cache_problems(run: Run) -> list[str]:
    """Refuse KV caches that outlive a weight update."""
    args = run.args
    if args.rollout_backend != "sglang" or args.debug_rollout_only:
        return []
    updated = [
        group for model in readable_models(args) if model.update_weights for group in model.groups
    ]
    given = {
        option for group in updated for option in outer_caches({**args.sglang, **group.overrides})
    }
    return [
        f"{option.replace('--', '--sglang-', 1)}: {OUTER_CACHE}: leave it out. "
        "--sglang-enable-hierarchical-cache keeps KV in the host memory of the server, which "
        "slime flushes"
        for option in sorted(given)
    ]


def _pipeline_problems(run: Run) -> list[str]:
    """Refuse pipeline stages of colocated servers: SGLang passes the same CUDA IPC handle to all
    pipeline stages of a tensor-parallel rank, but a handle can be opened only on the GPU that it
    comes from."""
    args = run.args
    stages = [
        int({**args.sglang, **group.overrides}.get("pp_size") or 1)
        for group, _ in shared_groups(args)
    ]
    if max(stages, default=1) == 1:
        return []
    return [
        f"--colocate with servers of {max(stages)} pipeline stages (--sglang-pp-size): CUDA IPC "
        "sends weights only to the tensor-parallel ranks of one stage; use only tensor "
        "parallelism, or --update-weight-transport disk"
    ]


def _quantization_problems(run: Run) -> list[str]:
    """Refuse models of which SGLang would not quantize the same layers as slime."""
    args = run.args
    if not args.rollout_quantization or args.rollout_backend != "sglang":
        return []
    architectures = set(run.config.get("architectures") or ())
    option = f"--rollout-quantization {args.rollout_quantization}"
    other = "use the embedded engine"
    if lost := ", ".join(sorted(architectures & set(_NO_SCALES))):
        return [f"{option}: SGLang does not load the scales of blocks of {lost}; {other}"]
    if unknown := ", ".join(sorted(architectures - set(SGLANG_FAMILIES))):
        known = ", ".join(SGLANG_FAMILIES)
        return [
            f"{option}: slime does not know which layers of {unknown} SGLang quantizes, but of "
            f"{known}; {other}"
        ]
    return []


def _serves_on_cpu(run: Run) -> bool:
    args = run.args
    has_gpu = args.sglang.get("device") != "cpu" and (run.machine.cuda or run.machine.in_cluster)
    return (
        args.rollout_backend == "sglang" and not args.rollout_external_engine_addrs and not has_gpu
    )


RULES = RuleSet(
    Path(__file__).with_name("rules.json"),
    {
        "SGLang on a CPU": _serves_on_cpu,
        "keys that differ": lambda run: (
            run.args.sglang.get("api_key") != run.args.router.get("api_key")
        ),
    },
    (_outer_cache_problems, _pipeline_problems, _quantization_problems),
)


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
