"""The whole configuration: one flat dataclass, composed of one small dataclass per concern."""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass
from typing import Any

from slime.config.agent import AgentConfig
from slime.config.algorithm import AlgorithmConfig, DistillationConfig, KlConfig, OffPolicyConfig
from slime.config.checkpoint import CheckpointConfig
from slime.config.cluster import ClusterConfig
from slime.config.data import DataConfig
from slime.config.engine import EngineConfig
from slime.config.evaluation import EvalConfig
from slime.config.flag import Flag, flags_of
from slime.config.observability import DebugConfig, MegatronExtrasConfig, ObservabilityConfig
from slime.config.optimizer import OptimizerConfig
from slime.config.passthrough import default_of
from slime.config.rollout import AsyncConfig, RewardConfig, RolloutConfig
from slime.config.run import RunConfig
from slime.config.training import BatchConfig, ModelConfig, WeightSyncConfig


@dataclass
class Args(
    MegatronExtrasConfig,
    DebugConfig,
    ObservabilityConfig,
    DistillationConfig,
    OffPolicyConfig,
    KlConfig,
    AlgorithmConfig,
    OptimizerConfig,
    CheckpointConfig,
    EvalConfig,
    RewardConfig,
    AgentConfig,
    EngineConfig,
    AsyncConfig,
    WeightSyncConfig,
    BatchConfig,
    RolloutConfig,
    DataConfig,
    ModelConfig,
    ClusterConfig,
    RunConfig,
):
    """Read ``args.rollout_temperature`` and so on; hooks may set attributes of their own.

    Pass-through flags stand in the dicts ``sglang``, ``router`` and ``megatron`` as given, and answer
    as attributes too: ``args.sglang_mem_fraction_static``, ``args.tensor_model_parallel_size``. What was
    not given answers with the default of the pinned version.
    """

    # Not flags: derived by defaults.py, or facts about the command line.
    use_critic: bool = False
    world_size: int = 1  # training processes
    sglang_model_routers: dict[str, tuple[str | None, int | None]] = dataclasses.field(default_factory=dict)
    sglang: dict[str, Any] = dataclasses.field(default_factory=dict)
    router: dict[str, Any] = dataclasses.field(default_factory=dict)
    megatron: dict[str, Any] = dataclasses.field(default_factory=dict)
    notices: list[str] = dataclasses.field(default_factory=list)
    explicit: frozenset[str] = frozenset()  # attributes that the user set, by flag or file

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        found, value = default_of(name, self.__dict__)
        if found:
            return value
        near = difflib.get_close_matches(name, self.__dict__, n=1)
        raise AttributeError(f"args has no {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))


FLAGS: dict[str, Flag] = flags_of(Args)
"""Every flag of slime's own, by attribute name, in the order of the groups."""
