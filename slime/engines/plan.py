"""Which servers a run starts: one :class:`EngineSpec` for each, from ``--rollout-num-gpus`` or ``--sglang-config``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slime.config.engine import DEFAULT_MODEL, ServedModel, WorkerType, read_server_groups, simple_groups

if TYPE_CHECKING:
    from slime.config.args import Args


@dataclass(frozen=True)
class EngineSpec:
    """One server. Everything that a restart needs, so it can be started again from this alone.

    Attributes:
        index: over all servers of the run; names actor and log.
        model: name of the served model, ``default`` without ``--sglang-config``.
        slot: its first accelerator (without a GPU: process slot) among ``--rollout-num-gpus``.
        num_gpus: its accelerators, over all its nodes.
        updates: it receives the trainer's weights.
        options: SGLang's options of its group, by attribute name.
    """

    index: int
    model_path: str
    model: str = DEFAULT_MODEL
    worker_type: WorkerType = "regular"
    slot: int = 0
    num_gpus: int = 1
    updates: bool = True
    options: dict[str, Any] = field(default_factory=dict)


def served_models(args: Args) -> list[ServedModel]:
    """What ``--sglang-config`` says, or one model in engines of one size."""
    if args.sglang_config:
        return read_server_groups(args.sglang_config, str(args.hf_checkpoint), args.rollout_num_gpus_per_engine)
    gpus = int(args.rollout_num_gpus or 0)
    per_engine = args.rollout_num_gpus_per_engine
    return simple_groups(str(args.hf_checkpoint), gpus, per_engine, args.prefill_num_servers or 0)


def plan_engines(args: Args) -> list[EngineSpec]:
    """The servers of a run, in order of model, group and slot. None with ``--rollout-external-engine-addrs``.

    Only the first model that is updated receives the trainer's weights.
    """
    if args.rollout_external_engine_addrs:
        return []
    specs: list[EngineSpec] = []
    slot = 0
    models = served_models(args)
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
            slot += group.num_gpus
    return specs
