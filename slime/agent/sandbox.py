"""The documented import path of the sandbox. The code is in :mod:`slime.plugins.agents.sandbox`."""

from slime.plugins.agents.sandbox import Isolation, Limits, Result, Sandbox, SandboxUnavailable

__all__ = ["Isolation", "Limits", "Result", "Sandbox", "SandboxUnavailable"]
