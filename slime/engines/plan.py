"""The servers that a run starts, each as an :class:`EngineSpec`, from ``--rollout-num-gpus`` or ``--sglang-config``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slime.config.engine import DEFAULT_MODEL, WorkerType, read_server_groups, simple_groups

if TYPE_CHECKING:
    from slime.config.args import Args


@dataclass(frozen=True)
class EngineSpec:
    """One server. It holds everything that a restart of the server needs.

    Attributes:
        index: The number of the server among all servers of the run. The names of its actor and log contain it.
        model: The name of the served model; ``default`` without ``--sglang-config``.
        slot: The first accelerator of the server among ``--rollout-num-gpus`` (without GPUs, its first process slot).
        num_gpus: The number of accelerators of the server on all its nodes.
        updates: Whether the server receives the trainer's weights.
        options: The SGLang options of its group, by attribute name.
    """

    index: int
    model_path: str
    model: str = DEFAULT_MODEL
    worker_type: WorkerType = "regular"
    slot: int = 0
    num_gpus: int = 1
    updates: bool = True
    options: dict[str, Any] = field(default_factory=dict)


def plan_engines(args: Args) -> list[EngineSpec]:
    """Return the servers of a run in the order of model, group and slot.

    The models are those of ``--sglang-config``, or without it one model, served by engines of one size. The list is
    empty with ``--rollout-external-engine-addrs``. The trainer has one set of weights, which goes to the first model
    with ``update_weights``; no other model is updated.
    """
    if args.rollout_external_engine_addrs:
        return []
    specs: list[EngineSpec] = []
    slot = 0
    checkpoint, per_engine = str(args.hf_checkpoint), args.rollout_num_gpus_per_engine
    if args.sglang_config:
        models = read_server_groups(args.sglang_config, checkpoint, per_engine)
    else:
        models = simple_groups(checkpoint, int(args.rollout_num_gpus or 0), per_engine, args.prefill_num_servers or 0)
    updated = next((model.name for model in models if model.update_weights), None)
    for model in models:
        for group in model.groups:
            count = group.num_gpus // group.num_gpus_per_engine if group.worker_type != "placeholder" else 0
            for i in range(count):
                specs.append(
                    EngineSpec(
                        index=len(specs),
                        model_path=model.model_path,
                        model=model.name,
                        worker_type=group.worker_type,
                        slot=slot + i * group.num_gpus_per_engine,
                        num_gpus=group.num_gpus_per_engine,
                        updates=model.name == updated,
                        options=dict(group.overrides),
                    )
                )
            slot += group.num_gpus  # also for a placeholder group, which reserves its GPUs and starts no server
    return specs


def engine_count(args: Args) -> int:
    """Return the number of engines behind the first router that decode. Prefill-only engines are not counted."""
    if args.rollout_external_engine_addrs:
        return len(args.rollout_external_engine_addrs)
    if args.sglang_config:
        specs = plan_engines(args)
        return sum(spec.model == specs[0].model and spec.worker_type != "prefill" for spec in specs)
    engines = int(args.rollout_num_gpus or 0) // args.rollout_num_gpus_per_engine
    return max(1, engines - (args.prefill_num_servers or 0))
