"""The documented import path of the sandbox. The code is in :mod:`slime.rollout.sandbox`."""

from slime.rollout.sandbox import Isolation, Limits, Result, Sandbox, SandboxUnavailable

__all__ = ["Isolation", "Limits", "Result", "Sandbox", "SandboxUnavailable"]
