"""What this room reads of the arguments, as one frozen value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slime.config.args import Args


@dataclass(frozen=True)
class AgentSettings:
    """How agent programs are run and how their requests are answered.

    Attributes:
        function_path: of the program, ``module.function`` (``--agent-function-path``).
        command: of the program, as a shell would split it (``--agent-command``); it precedes ``function_path``.
        timeout: seconds that a program may take.
        host: address on which the endpoint listens.
        tool_parser: name or path of the parser of tool calls; ``auto`` derives it from the model.
        reasoning_parser: name of the form in which the model writes its reasoning; ``auto`` and ``none`` are names too.
        constrains: the engine is told of ``tool_choice`` and ``response_format`` (``--agent-constrained-decoding``).
        max_turns: turns that a conversation may have; None or 0 do not limit them.
        max_context_len: tokens of a conversation (``--rollout-max-context-len``); None leaves it to the engines.
    """

    function_path: str | None
    command: str | None
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
            timeout=args.agent_timeout,
            host=args.agent_host,
            tool_parser=args.agent_tool_parser,
            reasoning_parser=args.agent_reasoning_parser,
            constrains=args.agent_constrained_decoding,
            max_turns=args.max_turns,
            max_context_len=args.rollout_max_context_len,
        )
