"""Documented import path of the interface of environments."""

from slime.plugins.agents.environments import (
    Environment,
    EnvironmentProblem,
    Episode,
    Step,
    StepFailed,
    StepLimits,
    Task,
)

__all__ = [
    "Environment",
    "EnvironmentProblem",
    "Episode",
    "Step",
    "StepFailed",
    "StepLimits",
    "Task",
]
