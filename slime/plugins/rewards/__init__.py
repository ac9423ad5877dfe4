"""The rewards of ``--rm-type``: math, choices, texts, sandboxed code, instructions (IFBench), encoders
and servers.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from slime import registry
from slime.config.files import read_named_rows
from slime.config.flag import flag, path_flag
from slime.registry import register

if TYPE_CHECKING:
    from slime.config.args import Args


PASS = 0.5
"""A required item whose reward is below this makes the whole reward 0."""


@dataclass
class CodeFlags:
    _title = "code"

    code_timeout: float = flag(10.0, above=0)
    """Processor time in seconds of a program in one test (--rm-type code); a slower one is wrong"""
    code_memory_mb: int = flag(1024, low=64)
    """Address space in MiB of a program (--rm-type code); one that needs more is wrong"""
    code_isolation: Literal["full", "process"] = "full"
    """Isolation of programs (--rm-type code): full needs namespaces of Linux; process is weaker,
    see slime/plugins/agents/sandbox.py"""


@dataclass
class RubricFlags:
    _title = "rubric"

    rubric: str | None = path_flag()
    """YAML file of the items of --rm-type rubric (docs/en/rewards.md)"""


@dataclass(frozen=True)
class Item:
    """One item of a rubric, which has one of ``rm_type``, ``path`` and ``judge``.

    Attributes:
        name: Of its curve, ``rollout/reward/NAME``.
        weight: Its share of the reward is weight / sum of the weights.
        required: Whether the reward is 0 where this item's is below :data:`PASS`.
        rm_type: A reward type.
        path: A function of the user, as for ``--custom-rm-path``.
        judge: What the model behind ``--rm-url`` is asked; the reward is P(yes).
    """

    name: str
    weight: float = 1.0
    required: bool = False
    rm_type: str | None = None
    path: str | None = None
    judge: str | None = None


def read_rubric(path: str) -> tuple[Item, ...]:
    """Read the items of a file, which is read again when it has changed.

    Raises:
        ValueError: Something is wrong with it. The message has a line for each problem.
    """
    return _read(path, Path(path).expanduser().stat().st_mtime_ns)


@functools.cache
def _read(path: str, changed: int) -> tuple[Item, ...]:
    return tuple(Item(**row) for row in read_named_rows(path, "--rubric", Item, _problems))


def _problems(row: Mapping[str, Any]) -> list[str]:
    problems = []
    if sum(row.get(kind) is not None for kind in ("rm_type", "path", "judge")) != 1:
        problems.append("it needs one of rm_type, path and judge")
    weight = row.get("weight", 1.0)
    if type(weight) not in (int, float) or not weight > 0:
        problems.append(f"its weight {weight!r} is not a number above 0")
    kind = row.get("rm_type")
    if kind is not None and (
        kind == "rubric" or str(kind).removeprefix("boxed_") not in registry.parts("reward")
    ):
        problems.append(f"{kind!r} is not a reward type that an item can have")
    return problems


def resolve(args: Args) -> list[str]:
    """Use the weights of the rubric for ``--advantage-estimator gdpo``, and tell what is wrong with
    the file.
    """
    if args.rubric is None:
        return []
    if args.rm_type is None:
        args.rm_type = "rubric"
    try:
        items = read_rubric(args.rubric)
    except (OSError, ValueError) as error:
        return str(error).splitlines()
    if args.reward_weights is not None:
        return ["--rubric and --reward-weights exclude each other: the file has the weights"]
    args.reward_weights = {item.name: item.weight for item in items}
    return []


_REWARDS = {
    "deepscaler": "math:DEEPSCALER",
    "dapo": "math:DAPO",
    "math": "math:MATH",
    "f1": "simple:F1",
    "last_number": "simple:LAST_NUMBER",
    "random": "simple:RANDOM",
    "ifbench": "ifbench_checks:IFBENCH",
    "gpqa": "gpqa:GPQA",
    "remote_rm": "servers:REMOTE_RM",
    "model": "encoder:MODEL",
    "rubric": "rubric:RUBRIC",
}


def parts() -> None:
    """Register the rewards of this plug-in."""
    for name, place in _REWARDS.items():
        register("reward", name, f"slime.plugins.rewards.{place}")
    register("reward", "code", "slime.plugins.rewards.code:CODE", flags=CodeFlags)
    register("check", "rm_url", "slime.plugins.rewards.servers:check_server", when=("rm_url",))
    register("resolver", "rubric", resolve, flags=RubricFlags)
