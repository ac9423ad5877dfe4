"""Black-box agents: unmodified programs that call the model through an OpenAI or Anthropic
endpoint.

:mod:`rollout` runs the program for a sample, :mod:`server` is the endpoint that it calls,
:mod:`session` generates its turns with the engines, and :mod:`trajectory` stores the turns as a
tree and converts its leaves to samples.
"""

from slime.registry import register


def parts() -> None:
    """Register the environments of other packages, the flags, and the check of those that name one."""
    for name in ("gymnasium", "harbor", "nemo_gym", "openenv", "reasoning_gym", "verifiers"):
        register("environment", name, f"slime.plugins.agents.environments.{name}:make")
    register("rules", "agents", "slime.plugins.agents:rules.json")
    register(
        "resolver",
        "agents",
        "slime.plugins.agents.config:resolve",
        flags="slime.plugins.agents.config:AgentConfig",
    )
    register(
        "check",
        "environment",
        "slime.plugins.agents.environments.source:check_environment",
        flags="slime.plugins.agents.config:EnvironmentConfig",
        when=("environment", "mcp_server"),
    )
