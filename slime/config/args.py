"""The complete configuration: a flat dataclass that is composed of one small dataclass per
topic.
"""

from __future__ import annotations

import copy
import dataclasses
import dis
import functools
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Any, Self

from slime.config.algorithm import AlgorithmConfig, DistillationConfig, KlConfig, OffPolicyConfig
from slime.config.cluster import ClusterConfig
from slime.config.data import DataConfig, EvalConfig, RewardConfig
from slime.config.engine import EngineConfig
from slime.config.flag import Flag, S, defaults_of, did_you_mean, flags_of, section
from slime.config.hf_config import SHAPE, model_dimension
from slime.config.layout import BatchConfig
from slime.config.lora import LoraConfig
from slime.config.observability import DebugConfig, ObservabilityConfig
from slime.config.passthrough import (
    Spelling,
    by_name,
    option_value,
    options,
    prefix_of,
    programs,
)
from slime.config.rollout import AsyncConfig, RolloutConfig
from slime.config.run import CheckpointConfig, RunConfig
from slime.config.trainer import (
    ModelConfig,
    OptimizerConfig,
    RolloutPrecisionConfig,
    TrainingPrecisionConfig,
)
from slime.config.weight_sync import WeightSyncConfig
from slime.registry import RegistryError, sections


class UnknownName(AttributeError):
    """Raised for an attribute that ``Args`` does not have.

    The message is created when it is read, because its search for similar names takes a
    millisecond. So ``getattr(args, name, default)`` in a user's function stays cheap."""

    def __init__(self, name: str, values: Mapping[str, object]) -> None:
        super().__init__(name, values)
        self._name = name
        self._values = values

    def __reduce__(self) -> tuple[type[AttributeError], tuple[str]]:
        return AttributeError, (str(self),)

    def __str__(self) -> str:
        # A name that exists with another backend needs another answer than a typing error.
        known = by_name("megatron").get(self._name)
        if known is not None:
            return (
                f"args has no attribute {self._name!r}: {known.flag.option} is not given, and only "
                "Megatron has a default"
            )
        return f"args has no attribute {self._name!r}{did_you_mean(self._name, self._values)}"


@functools.cache
def _has_default_of_its_own(code: CodeType, offset: int) -> bool:
    """Whether the instruction at ``offset`` calls ``getattr`` with a default, or ``hasattr``.

    Python asks an object in the same way for ``args.name`` and for ``getattr(args, "name",
    default)``. Only the instruction of the caller tells them apart. In all other forms, such as a
    function of C code, the answer is False.
    """
    instructions = list(dis.get_instructions(code))
    call = [instruction for instruction in instructions if instruction.offset <= offset][-1]
    if "CALL" not in call.opname or call.positions is None:
        return False
    # line and column: a call begins where the name of its function begins
    start = call.positions[::2]
    loads = (each for each in instructions if each.opname.startswith("LOAD"))
    name = next(
        (
            each.argval
            for each in loads
            if each.positions is not None and each.positions[::2] == start
        ),
        None,
    )
    return name == "hasattr" or (name == "getattr" and call.arg == 3)


def _is_asked_with_default() -> bool:
    """Whether the code that reads an attribute of ``args`` has a default of its own for it."""
    caller = sys._getframe(2)
    return _has_default_of_its_own(caller.f_code, caller.f_lasti)


@dataclass(init=False)
class Args(
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
    RolloutPrecisionConfig,
    EngineConfig,
    AsyncConfig,
    WeightSyncConfig,
    BatchConfig,
    RolloutConfig,
    DataConfig,
    LoraConfig,
    TrainingPrecisionConfig,
    ModelConfig,
    ClusterConfig,
    RunConfig,
):
    """All settings of a run as attributes, such as ``args.rollout_temperature``.

    Reading an unknown attribute raises :class:`UnknownName`. The user's own attributes are keys of
    ``--custom-config-path``, options that ``add_custom_arguments`` adds, or names that a function
    has assigned, which exist in its process.

    A flag that was not given and has no default is None: ``args.max_turns``. But code with a
    default of its own gets that one, as if the flag did not exist: ``getattr(args, "max_turns",
    15)`` is 15, and ``hasattr`` is False.

    Flags of SGLang, its router and Megatron that were given are in the dicts ``sglang``, ``router``
    and ``megatron``. They are also attributes: ``args.sglang_mem_fraction_static``,
    ``args.tensor_model_parallel_size``. A flag that was not given has the default of the pinned
    version; flags of Megatron have it only with ``--train-backend megatron``. The dimensions of the
    model (``hidden_size``, ``num_layers``, ``vocab_size`` and the others in ``hf_config.SHAPE``)
    have their true values with every backend: the flag's, or else those of config.json.
    """

    # These fields are not flags: they are derived, or describe the command line.
    use_critic: bool = False
    world_size: int = 1  # number of training processes
    sglang_model_routers: dict[str, tuple[str | None, int | None]] = dataclasses.field(
        default_factory=dict
    )
    sglang: dict[str, Any] = dataclasses.field(default_factory=dict)
    router: dict[str, Any] = dataclasses.field(default_factory=dict)
    megatron: dict[str, Any] = dataclasses.field(default_factory=dict)
    notices: list[str] = dataclasses.field(default_factory=list)
    explicit: frozenset[str] = frozenset()  # attributes that the user set, by flag or file

    def __init__(self, **values: Any) -> None:
        """Set the defaults of all flags, also of registered parts, and then ``values``."""
        for part in (Args, *sections()):
            self.__dict__.update(defaults_of(part))
        for family in programs():
            self.__dict__.setdefault(family, {})
        if unknown := values.keys() - self.__dict__.keys():
            raise TypeError(f"Args has no {', '.join(sorted(unknown))}")
        self.__dict__.update(values)

    @property
    def critic_gpus(self) -> int:
        """The number of GPUs that only the critic uses; 0 if it shares the actor's, or there is
        none."""
        if not self.use_critic or self.debug_rollout_only:
            return 0
        return (self.critic_num_nodes or 0) * (self.critic_num_gpus_per_node or 0)

    def __getattribute__(self, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if (
            value is None
            and name in FLAGS
            and name not in self.explicit
            and _is_asked_with_default()
        ):
            raise UnknownName(name, self.__dict__)
        return value

    # Python calls this for names that are not fields, and for those that the method above refuses.
    # Private names fail at once: copy and pickle look for methods such as __setstate__ before the
    # instance has any values.
    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        values = self.__dict__
        # Hooks read these with every backend, and most launch scripts give no MODEL_ARGS.
        if name in SHAPE and name not in values.get("megatron", {}):
            found = True
            value = model_dimension(values.get("hf_checkpoint"), name)
        else:
            found, value = option_value(name, values)
        if not found or (value is None and _is_asked_with_default()):
            raise UnknownName(name, values)
        return value

    def section(self, kind: type[S]) -> S:
        """Return the values of one section, such as ``args.section(CheckpointConfig)``, as a frozen
        object of its own.
        """
        return section(kind, self)

    def with_values(self, **changes: Any) -> Self:
        """Return a copy with other values, such as ``args.with_values(num_rollout=12)`` once the
        number is known.

        Raises:
            AttributeError: ``args`` has no attribute of this name.
        """
        for name in changes:
            if name not in self.__dict__:
                raise UnknownName(name, self.__dict__)
        other = copy.copy(self)
        other.__dict__.update(changes)
        return other


class _Flags(Mapping[str, Flag]):
    """The flags of slime, followed by those of registered parts, which are read when a flag is
    first looked up.
    """

    def __getitem__(self, name: str) -> Flag:
        return _flags_with(sections())[name]

    def __iter__(self) -> Iterator[str]:
        return iter(_flags_with(sections()))

    def __len__(self) -> int:
        return len(_flags_with(sections()))


@functools.cache
def _flags_with(parts: tuple[type, ...]) -> dict[str, Flag]:
    flags = flags_of(Args)
    for part in parts:
        for name, flag in flags_of(part).items():
            if name in flags:
                raise RegistryError(
                    f"{part.__module__}.{part.__qualname__} has the flag {flag.option}, which "
                    "exists"
                )
            flags[name] = flag
    return flags


FLAGS = _Flags()
"""All flags of slime itself and of registered parts by attribute name, in the order of the
groups.
"""


def spellings() -> dict[str, Spelling]:
    """Return all flags by attribute, and by option without the leading dashes and with ``_`` for
    ``-``.
    """
    return _spellings_with(sections())


@functools.cache
def _spellings_with(parts: tuple[type, ...]) -> dict[str, Spelling]:
    # Later entries replace earlier ones: a flag of slime comes before an option that is passed on.
    found = {underscored(option): known for option, known in options().items()}
    for family in programs():
        for name, known in by_name(family).items():
            found[prefix_of(family) + name] = known._replace(sets=True)
    for flag in FLAGS.values():
        off = f"no_{underscored(flag.option)}"
        if flag.kind == "toggle" or (flag.is_bool and off not in found):
            found[off] = Spelling(flag, None, False)
        found[underscored(flag.option)] = Spelling(flag, None, flag.kind != "negative")
        found[flag.name] = Spelling(flag, None, True)
    return found


def underscored(option: str) -> str:
    """Return the name of an option in Python and in files: ``--top-p`` is ``top_p``."""
    return option.removeprefix("--").replace("-", "_")
