"""``verifiers:TASKSET``: tasks, tools and rewards of an installed taskset of verifiers (its design
``verifiers.v1``).

An episode is a rollout of verifiers: its own code prepares the task, serves the task's tools,
applies its stop conditions and scores the conversation. The program that speaks with the model is
:class:`Conversation`, which runs in this process and reaches the model at the endpoint of the
sample's agent session (:mod:`slime.plugins.agents`).
"""

from __future__ import annotations

import contextlib
import functools
import json
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from slime.data.sample import Message
from slime.types import JsonValue

from . import (
    Environment,
    EnvironmentProblem,
    Task,
    missing_package,
)
from .played import Played, converse

if TYPE_CHECKING:
    from ..program import Task as Program

_COUNTED = 100_000
"""Tasks of an infinite taskset that are used if ``tasks`` is not given."""


def make(
    what: str, /, tasks: int = 0, seed: int | None = None, **options: JsonValue
) -> Environment:
    """Create the environment.

    Args:
        what: Id of the taskset: the name of its module, which must be installed or importable.
        tasks: Use only this many tasks, from the first. 0: all of them.
        seed: For the field of this name in the configuration of the taskset, if it has one.
        options: Fields of the configuration of the taskset.

    Raises:
        EnvironmentProblem: The package or the taskset is missing, an option is not valid, or the
            taskset needs more than one agent or a container.
    """
    try:
        from pydantic import ValidationError
        from verifiers.v1.envs.single_agent import SingleAgentEnv
        from verifiers.v1.utils.loaders import environment_class, load_taskset, taskset_config_type
    except ImportError as error:
        raise missing_package("verifiers", error) from error
    try:
        # The taskset says itself which options it has.
        config_type = taskset_config_type(what)
        fields = config_type.model_fields
        if seed is not None and "seed" in fields:
            options = {"seed": seed, **options}
        taskset = load_taskset(config_type.model_validate({**options, "id": what}))
    except (ImportError, AttributeError, TypeError) as error:
        raise EnvironmentProblem(f"verifiers:{what}: {error}") from error
    except ValidationError as error:
        known = ", ".join(sorted({*fields, "tasks"} - {"id"}))
        raise EnvironmentProblem(f"verifiers:{what}: {error}; its options are {known}") from error
    # What slime cannot run is refused before the run, not in its first episode.
    if environment_class(what) is not SingleAgentEnv:
        raise EnvironmentProblem(
            f"verifiers:{what} has an environment class of its own; slime runs tasksets of one "
            "agent"
        )
    if taskset.toolsets(taskset.config):
        raise EnvironmentProblem(
            f"verifiers:{what} has tools that all its tasks share; slime runs those of single tasks"
        )
    # An infinite taskset needs a number of prompts of an epoch.
    if not tasks and not taskset.bounded:
        tasks = _COUNTED
    return Verifiers(taskset.take(tasks) if tasks else taskset, what)


class Verifiers(Played):
    """The tasks of one taskset."""

    def __init__(self, taskset: Any, what: str) -> None:
        self.tasks = list(taskset)
        self._what = what

    def task(self, number: int) -> Task:
        data = self.tasks[number].data
        if data.prompt is None:
            raise EnvironmentProblem(
                f"verifiers:{self._what}: task {number} has no prompt; a simulated user opens it"
            )
        return Task(_messages(data.system_prompt, data.prompt))

    async def play(self, number: int, program: Program) -> float:
        """Run one rollout of verifiers against an endpoint, and return its reward.

        Raises:
            RuntimeError: The task, a tool or a reward function failed.
        """
        from verifiers.v1.agent import Agent
        from verifiers.v1.configs.agent import AgentConfig
        from verifiers.v1.configs.client import EvalClientConfig
        from verifiers.v1.runtimes import SubprocessConfig

        # The session is part of the URL, so no key of the user's is sent: the variable does not
        # exist.
        client = EvalClientConfig(base_url=program.openai_base_url, api_key_var="SLIME_HAS_NO_KEY")
        agent = Agent(
            AgentConfig(
                model=program.model,
                client=client,
                runtime=SubprocessConfig(),
                harness={"id": "null"},
            )
        )
        agent.harness = _harness_class()(agent.config.harness)
        trace = await agent.run(self.tasks[number])
        if not trace.ok:
            error = trace.last_error
            raise RuntimeError(
                f"verifiers: {error.type}: {error.message}"
                if error
                else "verifiers: the rollout failed"
            )
        return float(trace.reward)


def _messages(system: str | None, prompt: Any) -> list[Message]:
    from verifiers.v1.dialects.chat import message_to_wire

    first: list[Message] = [{"role": "system", "content": system}] if system else []
    if isinstance(prompt, str):
        return [*first, {"role": "user", "content": prompt}]
    return [*first, *(message_to_wire(message) for message in prompt)]


@functools.cache
def _harness_class() -> Any:
    """The harness, as a subclass of the package's, which is imported only here."""
    from verifiers.v1.harness import Harness
    from verifiers.v1.runtimes import ProgramResult

    class Conversation(Harness[Any]):
        """A chat with the task's tools, until the model answers without a call or its context is
        full.
        """

        APPENDS_SYSTEM_PROMPT = SUPPORTS_MCP = True
        EXECUTES_CODE = NEEDS_CONTAINER = False

        async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):  # type: ignore[no-untyped-def]
            system, prompt = self.resolve_prompt(data)
            messages = _messages(system, prompt)
            # The tool servers of the task live as long as the conversation.
            stack = AsyncExitStack()
            try:
                tools, call = await _tools(stack, mcp_urls, self.config.tool_timeout)
                await converse(endpoint, secret, ctx.model, messages, tools, call)
            finally:
                # The conversation is complete, however a tool server ends.
                with contextlib.suppress(Exception):
                    await stack.aclose()
            return ProgramResult(exit_code=0, stdout="", stderr="")

    return Conversation


async def _tools(
    stack: AsyncExitStack, urls: dict[str, str], seconds: float
) -> tuple[list[Any], Any]:
    """Connect to the tool servers of a task; return the schemas and a function that calls a
    tool.
    """
    from ..messages import RAW_ARGUMENTS
    from .mcp import Servers

    servers = await Servers.connect(stack, list(urls.values()), seconds)

    async def call(name: str, text: str) -> str:
        try:
            arguments = json.loads(text or "{}")
        except (ValueError, RecursionError):
            arguments = None
        content = await servers.call(
            {
                "name": name,
                "arguments": arguments if isinstance(arguments, dict) else {RAW_ARGUMENTS: text},
            }
        )
        if servers.lost is not None:
            raise RuntimeError(servers.lost)
        return content

    return servers.schemas, call
