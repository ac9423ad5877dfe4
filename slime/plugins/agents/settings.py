"""The arguments that ``slime.plugins.agents`` reads, as one immutable object."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slime.config.args import Args


@dataclass(frozen=True)
class AgentSettings:
    """Settings for running agent programs and answering their requests.

    Attributes:
        function_path: Path of the program as a function (``--agent-function-path``).
        command: The program as a command line, which is split as by a shell (``--agent-command``). It takes precedence
            over ``function_path``.
        environment: Names of variables that a command gets in addition to those that it needs to run (``--agent-env``).
        timeout: Deadline of a program in seconds.
        host: Address on which the endpoint listens.
        tool_parser: Name or path of the tool parser; ``auto`` selects it by the model.
        reasoning_parser: Name of the reasoning parser, ``auto`` or ``none``.
        constrains: Whether the engine constrains answers to ``tool_choice`` and ``response_format``
            (``--agent-constrained-decoding``).
        max_turns: Maximum number of turns of a conversation; None or 0 for no limit.
        max_context_len: Maximum number of tokens of a conversation (``--rollout-max-context-len``); None for the
            limit of the engines.
    """

    function_path: str | None
    command: str | None
    environment: tuple[str, ...]
    timeout: float
    host: str
    tool_parser: str
    reasoning_parser: str
    constrains: bool
    max_turns: int | None
    max_context_len: int | None

    @classmethod
    def from_args(cls, args: Args) -> AgentSettings:
        return cls(
            function_path=args.agent_function_path,
            command=args.agent_command,
            environment=tuple(args.agent_env or ()),
            timeout=args.agent_timeout,
            host=args.agent_host,
            tool_parser=args.agent_tool_parser,
            reasoning_parser=args.agent_reasoning_parser,
            constrains=args.agent_constrained_decoding,
            max_turns=args.max_turns,
            max_context_len=args.rollout_max_context_len,
        )
