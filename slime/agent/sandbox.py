"""The documented import path of the sandboxes. The code is in :mod:`slime.plugins.agents.sandbox` and
:mod:`slime.plugins.compat.agent_api`.
"""

from slime.plugins.agents.sandbox import Isolation, Limits, Result, Sandbox, SandboxUnavailable
from slime.plugins.compat.agent_api import E2BSandbox, exec_and_wait

__all__ = [
    "E2BSandbox", "Isolation", "Limits", "Result", "Sandbox", "SandboxUnavailable", "exec_and_wait",
]  # fmt: skip
