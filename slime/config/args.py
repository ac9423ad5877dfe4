"""The whole configuration: one flat dataclass, composed of one small dataclass per concern."""

from __future__ import annotations

import copy
import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from slime.config.agent import AgentConfig
from slime.config.algorithm import AlgorithmConfig
from slime.config.batch import BatchConfig
from slime.config.cluster import ClusterConfig
from slime.config.corrections import DistillationConfig, KlConfig, OffPolicyConfig
from slime.config.data import DataConfig, EvalConfig, RewardConfig
from slime.config.engine import EngineConfig
from slime.config.flag import Flag, flags_of
from slime.config.flag_support import UnsupportedConfig
from slime.config.hf_config import SHAPE, model_dimension
from slime.config.observability import DebugConfig, MegatronExtrasConfig, ObservabilityConfig
from slime.config.passthrough import by_name, option_value
from slime.config.rollout import AsyncConfig, RolloutConfig
from slime.config.run import CheckpointConfig, RunConfig
from slime.config.trainer import ModelConfig, OptimizerConfig
from slime.config.weight_sync import WeightSyncConfig


class UnknownName(AttributeError):
    """Args has no attribute of this name. The message, which takes a millisecond to make, is made when it is read, so
    that ``getattr(args, name, default)`` in a user's function is cheap."""

    def __init__(self, name: str, values: Mapping[str, object]) -> None:
        super().__init__(name, values)
        self._name, self._values = name, values

    def __reduce__(self) -> tuple[type[AttributeError], tuple[str]]:
        return AttributeError, (str(self),)

    def __str__(self) -> str:
        known = by_name("megatron").get(self._name)
        if known is not None:
            option = known.flag.option
            return f"args has no {self._name!r}: {option} is not given, and its default holds for Megatron only"
        near = difflib.get_close_matches(self._name, self._values, n=1)
        return f"args has no {self._name!r}" + (f"; did you mean {near[0]!r}?" if near else "")


@dataclass
class Args(
    UnsupportedConfig,
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
    """Read ``args.rollout_temperature`` and so on. A name that is unknown raises, whether it is read or assigned.

    Attributes of the user's own are keys of ``--custom-config-path``, or options that ``add_custom_arguments`` adds.

    Flags of SGLang, its router and Megatron stand in the dicts ``sglang``, ``router`` and ``megatron`` as given, and
    are attributes too: ``args.sglang_mem_fraction_static``, ``args.tensor_model_parallel_size``. One that was not given
    has the default of the pinned version; Megatron's have it only with ``--train-backend megatron``. The model's
    dimensions (``hidden_size``, ``num_layers``, ``vocab_size`` and the others in ``hf_config.SHAPE``) have their true
    values with every backend: as given, else from config.json of ``--hf-checkpoint``.
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
        values = self.__dict__
        if name in SHAPE and name not in values.get("megatron", {}):
            return model_dimension(values.get("hf_checkpoint"), name)
        found, value = option_value(name, values)
        if found:
            return value
        raise UnknownName(name, values)

    def __setattr__(self, name: str, value: object) -> None:
        if name not in self.__dict__ and name not in type(self).__dataclass_fields__:
            raise UnknownName(name, self.__dict__)
        object.__setattr__(self, name, value)

    def declare(self, name: str, value: object) -> None:
        """Add an attribute of the user's own, or set one that is there."""
        self.__dict__[name] = value

    def save_folder(self) -> Path:
        """The folder of snapshots.

        Raises:
            ValueError: neither ``--save`` nor ``--save-interval`` is given.
        """
        if self.save is None:
            raise ValueError("the run has no folder for snapshots: give --save or --save-interval")
        return Path(self.save)

    def with_values(self, **changes: Any) -> Self:
        """A copy that holds what is known only at run time, for users' functions: ``args.with_values(num_rollout=12)``.

        Raises:
            AttributeError: a name that args does not have.
        """
        for name in changes:
            if name not in self.__dict__:
                raise UnknownName(name, self.__dict__)
        other = copy.copy(self)
        other.__dict__.update(changes)
        return other


FLAGS: dict[str, Flag] = flags_of(Args)
"""Every flag of slime's own, by attribute name, in the order of the groups."""
