"""Whether the machine can hold what the flags ask for."""

from __future__ import annotations

from slime.config.args import FLAGS, Args
from slime.config.machine import Machine, connection_limit, installed
from slime.config.server_groups import (
    ServedModel,
    ServerGroup,
    ServerGroupError,
    read_server_groups,
    simple_groups,
    total_gpus,
)

EXTRAS = {"megatron": ("megatron.core", "megatron"), "sglang": ("sglang", "sglang")}


def check_placement(args: Args) -> list[str]:
    """Rules that hold on any machine."""
    problems = []
    per_engine = args.rollout_num_gpus_per_engine
    external = bool(args.rollout_external_engine_addrs)
    problems += _server_groups(args)
    problems += _colocated_pipelines(args)
    if not args.debug_train_only and not external and not args.sglang_config:
        if args.rollout_num_gpus == 0:
            problems.append(
                "--rollout-num-gpus 0 leaves no engine: give at least 1, or --rollout-external-engine-addrs"
            )
        elif per_engine >= 1 and args.rollout_num_gpus % per_engine:
            problems.append(
                f"--rollout-num-gpus {args.rollout_num_gpus} is no multiple of "
                f"--rollout-num-gpus-per-engine {per_engine}"
            )
    if args.rollout_backend == "embedded" and per_engine > 1:
        problems.append(
            f"--rollout-num-gpus-per-engine {per_engine}: the embedded engine runs on one GPU; "
            "use 1 (more engines: --rollout-num-gpus)"
        )
    if args.embedded_device is not None and args.embedded_device.partition(":")[0] not in ("cpu", "cuda"):
        problems.append(f"--embedded-device {args.embedded_device}: cpu or cuda")
    return problems


def _server_groups(args: Args) -> list[str]:
    """``--sglang-config`` and ``--prefill-num-servers``: SGLang only, one or the other, and as many GPUs as asked."""
    problems = []
    given = [name for name in ("sglang_config", "prefill_num_servers") if getattr(args, name)]
    options = ["--" + name.replace("_", "-") for name in given]
    if given and args.rollout_backend != "sglang":
        problems.append(f"{options[0]} is for SGLang: use --rollout-backend sglang")
    if given and args.rollout_external_engine_addrs:
        problems.append(f"{options[0]} says what slime starts, --rollout-external-engine-addrs that it starts nothing")
    if len(given) == 2:
        problems.append(f"{options[1]} and {options[0]}: write the prefill group into the file")
    if args.sglang_config:
        problems += _config_file(args)
    elif args.prefill_num_servers:
        servers = (args.rollout_num_gpus or 0) // max(args.rollout_num_gpus_per_engine, 1)
        if not 0 < args.prefill_num_servers < servers:
            problems.append(
                f"--prefill-num-servers {args.prefill_num_servers} of {servers} servers in all: both kinds are needed"
            )
    return problems


def _config_file(args: Args) -> list[str]:
    where = f"--sglang-config {args.sglang_config}"
    try:
        models = read_server_groups(args.sglang_config, str(args.hf_checkpoint), args.rollout_num_gpus_per_engine)
    except (ServerGroupError, OSError) as error:
        return [f"{where}: {error}"]
    total = total_gpus(models)
    if total != args.rollout_num_gpus:
        return [f"{where}: its groups have {total} GPUs, --rollout-num-gpus is {args.rollout_num_gpus}"]
    return []


def _colocated_pipelines(args: Args) -> list[str]:
    """SGLang gives all pipeline stages of a tensor-parallel rank the same handle, which opens on one GPU only."""
    stages = [int({**args.sglang, **group.overrides}.get("pp_size") or 1) for group, _ in _shared_groups(args)]
    if max(stages, default=1) == 1:
        return []
    return [
        f"--colocate with servers of {max(stages)} pipeline stages (--sglang-pp-size): CUDA IPC brings weights to the "
        "tensor-parallel ranks of one stage only; use tensor parallelism alone, or --update-weight-transport disk"
    ]


def engines_beside_trainer(args: Args) -> list[str]:
    """On GPUs: ``--colocate`` with servers on GPUs that no training rank is on, which CUDA IPC cannot reach."""
    train = args.actor_num_nodes * args.actor_num_gpus_per_node
    if all(end <= train for _, end in _shared_groups(args)):
        return []
    return [
        f"--colocate with {_asked(args)}: servers that get the trainer's weights would be on GPUs without a training "
        f"rank, and CUDA IPC does not reach these; let them have the first {train} of --rollout-num-gpus, or use "
        "--update-weight-transport disk"
    ]


def _shared_groups(args: Args) -> list[tuple[ServerGroup, int]]:
    """Groups of servers that get weights by handles from the trainer on their GPUs, and where their GPUs end."""
    by_handle = args.colocate and args.update_weight_transport == "nccl" and args.rollout_backend == "sglang"
    if not by_handle or args.debug_train_only or args.debug_rollout_only or args.rollout_external_engine_addrs:
        return []
    shared, end = [], 0
    models = _served_models(args)
    updated = next((model for model in models if model.update_weights), None)
    for model in models:
        for group in model.groups:
            end += group.num_gpus
            if model is updated and group.worker_type != "placeholder":
                shared.append((group, end))
    return shared


def _served_models(args: Args) -> list[ServedModel]:
    """None where the file of ``--sglang-config`` is wrong, which :func:`check_placement` reports."""
    per_engine = args.rollout_num_gpus_per_engine
    if not args.sglang_config:
        gpus = int(args.rollout_num_gpus or 0)
        return simple_groups(str(args.hf_checkpoint), gpus, per_engine, args.prefill_num_servers or 0)
    try:
        return read_server_groups(args.sglang_config, str(args.hf_checkpoint), per_engine)
    except (ServerGroupError, OSError):
        return []


def check_routing_replay(args: Args, machine: Machine) -> list[str]:
    """Only SGLang on a GPU says which experts it chose."""
    own = (args.custom_generate_function_path, args.load_debug_rollout_data)
    own_rollout = args.rollout_function_path != FLAGS["rollout_function_path"].default
    if not args.use_rollout_routing_replay or any(own) or own_rollout:
        return []
    if args.rollout_backend != "sglang":
        return ["--use-rollout-routing-replay: the embedded engine does not say which experts it chose; use SGLang"]
    on_cpu = args.sglang.get("device") == "cpu" or not (machine.cuda or machine.in_cluster)
    if on_cpu and not args.rollout_external_engine_addrs:
        return [
            "--use-rollout-routing-replay: SGLang records experts on a GPU only, and its engines here run on the CPU"
        ]
    return []


def check_machine(args: Args, machine: Machine) -> list[str]:
    """Rules about this machine; a cluster that Ray reaches is asked when it is joined."""
    problems = _absent_packages(args)
    if args.rollout_backend == "sglang":
        _embedded_flags(args)
        on_cpu = args.sglang.get("device") == "cpu" or not (machine.cuda or machine.in_cluster)
        if args.deterministic and on_cpu and not args.rollout_external_engine_addrs:
            problems.append("--deterministic: SGLang has deterministic kernels for CUDA only; use the embedded engine")
    engines = len(args.rollout_external_engine_addrs or []) or (
        (args.rollout_num_gpus or 0) // max(args.rollout_num_gpus_per_engine, 1)
    )
    asked, most = args.sglang_server_concurrency * engines, connection_limit()
    if asked > most and not machine.in_cluster:
        args.notices.append(
            f"--sglang-server-concurrency {args.sglang_server_concurrency} of {engines} engines is {asked} requests "
            f"under way: limited to {most} by this machine's ports (ip_local_port_range) and open files (ulimit -Hn)"
        )
    if args.record_memory_history and not machine.cuda:
        problems.append("--record-memory-history records CUDA allocations, and there is no CUDA here: leave it out")
    if args.train_dtype == "float32" and machine.cuda:
        args.notices.append("--train-dtype float32 on a GPU is for comparisons; bfloat16 is several times faster")
    if machine.in_cluster:
        return problems  # its GPUs are known when it is joined
    if machine.cuda:
        problems += engines_beside_trainer(args)
    return problems + (_too_many_gpus(args, machine) if machine.cuda else _too_many_slots(args, machine))


def _embedded_flags(args: Args) -> None:
    given = sorted(name for name in args.explicit if name.startswith("embedded_"))
    if given:
        options = ", ".join("--" + name.replace("_", "-") for name in given)
        args.notices.append(f"{options}: for the embedded engine; SGLang's own are --sglang-…")


def _absent_packages(args: Args) -> list[str]:
    problems = []
    for option, value in (("--train-backend", args.train_backend), ("--rollout-backend", args.rollout_backend)):
        module, extra = EXTRAS.get(value, ("", ""))
        if value == "sglang" and args.rollout_external_engine_addrs:
            continue  # it runs elsewhere
        if module and not installed(module):
            problems.append(f"{option} {value}: {value} is not installed; pip install 'slime[{extra}]'")
    if args.use_wandb and not installed("wandb"):
        problems.append("--use-wandb: wandb is not installed; pip install 'slime[wandb]'")
    return problems


def _too_many_gpus(args: Args, machine: Machine) -> list[str]:
    train = 0 if args.debug_rollout_only else args.actor_num_nodes * args.actor_num_gpus_per_node
    external = bool(args.rollout_external_engine_addrs)
    rollout = 0 if args.debug_train_only or external else args.rollout_num_gpus
    needed = max(train, rollout) if args.colocate else train + rollout
    if needed <= machine.gpus:
        return []
    share = "" if args.colocate else "--colocate to share them, "
    return [
        f"{needed} GPUs are asked for ({_asked(args)}, {'shared' if args.colocate else 'each their own'}) and this "
        f"machine has {machine.gpus}: {share}smaller numbers, "
        "or a Ray cluster (ray start, then ray job submit or RAY_ADDRESS)"
    ]


def _too_many_slots(args: Args, machine: Machine) -> list[str]:
    """Without a GPU a "GPU" is a process: more than cores only gets in its own way."""
    asked = {
        "--actor-num-gpus-per-node": args.actor_num_nodes * args.actor_num_gpus_per_node
        if "actor_num_gpus_per_node" in args.explicit
        else 0,
        "--rollout-num-gpus": args.rollout_num_gpus if "rollout_num_gpus" in args.explicit else 0,
    }
    if args.debug_rollout_only:
        del asked["--actor-num-gpus-per-node"]
    if args.debug_train_only:
        del asked["--rollout-num-gpus"]
    if all(count <= machine.cores for count in asked.values()):
        return []
    change = " ".join(f"{option} 1" for option in asked)
    return [
        f"{_asked(args)}: this machine has no GPU and {machine.cores} CPU cores, so at most {machine.cores} processes "
        f"of each kind run here: use {change} (or those lines in a file for --override), or a Ray cluster"
    ]


def _asked(args: Args) -> str:
    nodes = f"--actor-num-nodes {args.actor_num_nodes} " if args.actor_num_nodes > 1 else ""
    return (
        f"{nodes}--actor-num-gpus-per-node {args.actor_num_gpus_per_node}, --rollout-num-gpus {args.rollout_num_gpus}"
    )
