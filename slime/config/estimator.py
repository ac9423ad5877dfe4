"""From ``--advantage-estimator`` to its class: a built-in one by its name, a user's own by its path."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import TYPE_CHECKING

from slime.algorithms.algorithm import Algorithm, EstimatorSettings, baseline_problem, class_problem
from slime.algorithms.registry import ALGORITHMS
from slime.config.flag import is_hook_path
from slime.config.hooks import HookError, load_function

if TYPE_CHECKING:
    from slime.config.args import Args


@functools.cache
def algorithm_class(name: str) -> type[Algorithm]:
    """The class that the flag names. It is the same in the driver, the rollout manager and the training ranks.

    Raises:
        HookError: neither a built-in name nor the path of a class that derives from :class:`Algorithm`. Importing the
            user's file may raise anything else.
    """
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    if not is_hook_path(name):
        raise HookError(
            f"unknown --advantage-estimator {name!r}; one of {', '.join(ALGORITHMS)}, or the path of your own class"
        )
    try:
        found: type[Algorithm] = load_function(name)
    except HookError as error:
        raise HookError(f"--advantage-estimator: {error}") from None
    if problem := class_problem(found):
        raise HookError(f"--advantage-estimator {name}: {problem}")
    return found


def create_algorithm(args: Args) -> Algorithm:
    """The run's estimator with its settings."""
    return algorithm_class(args.advantage_estimator)(estimator_settings(args))


def estimator_settings(args: Args) -> EstimatorSettings:
    return EstimatorSettings(
        eps_clip=args.eps_clip,
        eps_clip_high=args.eps_clip if args.eps_clip_high is None else args.eps_clip_high,
        eps_clip_c=args.eps_clip_c,
        gamma=args.gamma,
        lambd=args.lambd,
        kl_coef=args.kl_coef,
        std_normalization=args.grpo_std_normalization,
        max_response_len=args.rollout_max_response_len,
        custom={name: value for name, value in vars(args).items() if name not in type(args).__dataclass_fields__},
    )


def loading_problem(name: str) -> str | None:
    """Why the estimator cannot be loaded; None where it can."""
    try:
        algorithm_class(name)
    except HookError as error:
        return str(error)
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # the user's module ran and failed: any error
        return f"--advantage-estimator {name}: importing it failed with {type(error).__name__}: {error}"
    return None


def trial_problem(args: Args) -> str | None:
    """Why the estimator's baseline fails on a few small groups, which are tried before a run starts."""
    try:
        algorithm = create_algorithm(args)
    except Exception as error:  # the constructor of the user's class
        return f"--advantage-estimator {args.advantage_estimator}: {type(error).__name__}: {error}"
    problem = baseline_problem(algorithm)
    return f"--advantage-estimator {args.advantage_estimator}: {problem}" if problem else None


def estimator_label(name: str) -> str:
    """A name for folders and plots: ``my_algo.py:MyAlgorithm`` gives ``MyAlgorithm``."""
    return Path(name).stem if name.endswith(".py") else re.split(r"[.:]", name)[-1]


def known_where(fact: str, value: bool = True) -> str:
    """The built-in estimators of which a fact holds, in words: ``known_where("needs_critic")``."""
    return " or ".join(name for name, one in ALGORITHMS.items() if getattr(one, fact) is value)
