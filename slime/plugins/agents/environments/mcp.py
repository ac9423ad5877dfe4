"""The generate function of ``--mcp-server``: tools of MCP servers, which the model calls in several
turns.

Each sample has connections of its own, so a server that is a command is a process of its own for
each sample. The schemas of the tools go into the chat template; a template without tools gets them
in words. Calls are parsed as the agents' endpoint parses them (``--agent-tool-parser``). Errors of
a tool are messages for the model; a server that cannot be reached leaves its sample without a
reward.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shlex
import shutil
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.data.sample import Message, Sample
from slime.rollout.rm_hub.outcome import mark_unscored
from slime.rollout.state import GenerateState
from slime.types import SamplingParams

from ..chat import shows_tools
from ..conversation import Conversation
from ..messages import RAW_ARGUMENTS, CalledFunction, Tool, ToolCall
from ..sandbox import Limits, SandboxUnavailable, program_command
from ..tool_parsers import ToolParser, parser_name, tool_parser, tools_in_words
from . import EnvironmentProblem, StepFailed, missing_package
from .rollout import give_up, said

if TYPE_CHECKING:
    from mcp import Client

    from slime.config.args import Args

logger = logging.getLogger(__name__)
_SANDBOX = "sandbox:"
"""Begins the value of ``--mcp-server`` for a Python program that runs in the sandbox."""
_SANDBOX_LIMITS = Limits(
    seconds=86_400, memory_bytes=2 << 30, disk_bytes=64 << 20, open_files=256, tasks=64
)


async def generate(
    args: Args, sample: Sample, sampling_params: SamplingParams, evaluation: bool = False
) -> Sample:
    """Generate one conversation in which the model may call the tools of ``--mcp-server``.

    It ends with the first turn without a call. ``--rm-type`` or ``--custom-rm-path`` scores it.
    """
    stack = AsyncExitStack()
    try:
        servers = await Servers.connect(stack, args.mcp_server or [], args.environment_timeout)
        _show_tools(shows_tools(GenerateState(args).tokenizer), sample, servers.schemas)
        return await _converse(Conversation(args, sample, sampling_params, evaluation), servers)
    except StepFailed as failed:
        return give_up(GenerateState(args), sample, failed)
    finally:
        # Not as a context of the code above: the tasks of a client would wrap an error of an engine
        # in a group.
        # The conversation does not depend on how a server ends.
        with contextlib.suppress(Exception):
            await stack.aclose()


async def _converse(talk: Conversation, servers: Servers) -> Sample:
    args = talk.args
    sample = talk.sample
    name = parser_name(args.agent_tool_parser, talk.state.tokenizer, args.hf_checkpoint)
    parser = tool_parser(name, servers.schemas)
    # An aborted sample continues: the new servers are brought to where the old ones were. Servers
    # over HTTP still are.
    past = [
        entry["function"]
        for turn in talk.turns
        if turn["answered"]
        for entry in _calls(parser, said(talk, turn))
    ]
    for function in past:
        if function["name"] in servers.started and servers.lost is None:
            await talk.tools([servers.call(function)], args.environment_timeout)
    if servers.lost is not None:
        sample.status = Sample.Status.FAILED  # an aborted sample would be generated again and again
        mark_unscored(sample, "error", servers.lost)
        return sample
    # The conversation goes on until the model calls no tool or has no room left.
    while await talk.turn() is not None:
        calls = _calls(parser, said(talk, talk.turns[-1]))
        if not calls:
            break
        results = await talk.tools(
            [servers.call(entry["function"]) for entry in calls], args.environment_timeout
        )
        if servers.lost is not None:
            mark_unscored(sample, "error", servers.lost)
            break
        # Each result is a message of its own, in the order of the calls.
        names = [entry["function"]["name"] for entry in calls]
        messages = [
            {"role": "tool", "name": n, "content": r} for n, r in zip(names, results, strict=True)
        ]
        if not talk.reply(messages):
            break
    return sample


def _calls(parser: ToolParser, text: str) -> list[ToolCall]:
    try:
        return parser.parse(text)[1]
    except Exception:  # a user's parser can raise anything, and the text can be malformed
        logger.exception(
            "the tool parser failed, so a turn of the model counts as one without calls"
        )
        return []


class Servers:
    """The tools of connected servers. Two servers must not have a tool of the same name.

    Attributes:
        schemas: The tools in the form of chat templates.
        lost: Why a server could not answer; None as long as all do.
        started: The names of the tools whose server was started for this sample.
    """

    def __init__(self) -> None:
        self.schemas: list[Tool] = []
        self.lost: str | None = None
        self.started: set[str] = set()
        self._clients: dict[str, Any] = {}

    @classmethod
    async def connect(
        cls, stack: AsyncExitStack, addresses: Sequence[str], seconds: float
    ) -> Servers:
        """Connect to the servers, until ``stack`` is closed.

        Raises:
            StepFailed: A server cannot be started or reached, or two have a tool of the same name.
        """
        from mcp import Client, StdioServerParameters
        from mcp.client.stdio import stdio_client

        servers = cls()
        for address in addresses:
            target: Any = address
            try:
                if not address.startswith(("http://", "https://")):
                    command, *words = _command(address)
                    target = stdio_client(StdioServerParameters(command=command, args=words))
                client = await stack.enter_async_context(
                    Client(target, read_timeout_seconds=seconds)
                )
                listed = await _listed(client, seconds)
            # The package, anyio and the HTTP client raise different errors.
            except Exception as error:
                cause: BaseException = error
                # its own text does not say what happened
                while isinstance(cause, BaseExceptionGroup):
                    cause = cause.exceptions[0]
                raise StepFailed(
                    "error", f"--mcp-server {address}: {type(cause).__name__}: {cause}"[:2000]
                ) from error
            for tool in listed:
                servers.add(tool, client, address)
            if target is not address:
                servers.started |= {tool.name for tool in listed}
        return servers

    def add(self, tool: Any, client: Any, address: str) -> None:
        """Add a tool of a client."""
        if tool.name in self._clients:
            raise StepFailed(
                "error", f"--mcp-server {address}: another server has a tool {tool.name} too"
            )
        self._clients[tool.name] = client
        self.schemas.append({
            "type": "function",
            "function": {
                "name": tool.name, "description": tool.description or "", "parameters": tool.input_schema,
            },
        })  # fmt: skip

    async def call(self, function: CalledFunction) -> str:
        """Call a tool; errors of the call are texts for the model."""
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED

        name = function["name"]
        arguments = function["arguments"]
        if name not in self._clients:
            return f"error: there is no tool {name!r}; there are {', '.join(self._clients)}"
        if RAW_ARGUMENTS in arguments:
            return "error: the arguments are not a JSON object"
        try:
            result = await self._clients[name].call_tool(name, arguments)
        except MCPError as error:
            if error.error.code != CONNECTION_CLOSED:
                return f"error: {error}"
            self.lost = f"the MCP server of the tool {name} has ended: {error}"[:2000]
            return "error: no answer"
        except Exception as error:  # The connection is lost.
            self.lost = f"the MCP server of the tool {name}: {type(error).__name__}: {error}"[:2000]
            return "error: no answer"
        parts = [part.text if part.type == "text" else f"[{part.type}]" for part in result.content]
        text = "\n".join(parts)
        return f"error: {text}" if result.is_error else text


async def _listed(client: Client, seconds: float) -> list[Any]:
    """Return the tools of a server, which may list them in several pages.

    Raises:
        TimeoutError: The last page did not come within ``seconds``.
    """
    # each page has a deadline, but the number of pages has no limit
    async with asyncio.timeout(seconds):
        page = await client.list_tools()
        tools = list(page.tools)
        while page.next_cursor:
            page = await client.list_tools(cursor=page.next_cursor)
            tools += page.tools
    return tools


def _command(address: str) -> list[str]:
    """Return the words of the command of a server: of a value of ``--mcp-server`` that is no
    URL.
    """
    if not address.startswith(_SANDBOX):
        return shlex.split(address)
    file, *arguments = shlex.split(address.removeprefix(_SANDBOX))
    return program_command(file, arguments, _SANDBOX_LIMITS)


def check_servers(addresses: Sequence[str]) -> None:
    """Check what can be known before a run.

    Raises:
        EnvironmentProblem: The package is missing or too old, a program does not exist, or the
            sandbox does not work on this machine.
    """
    try:
        from mcp import Client, StdioServerParameters  # noqa: F401
    except ImportError as error:
        raise missing_package("mcp", error) from error
    for address in addresses:
        if address.startswith(("http://", "https://")):
            continue
        try:
            words = shlex.split(address.removeprefix(_SANDBOX))
        except ValueError as error:
            raise EnvironmentProblem(f"{address}: it is no command: {error}") from error
        if not address.startswith(_SANDBOX):
            if not words or shutil.which(words[0]) is None:
                name = repr(words[0]) if words else "in it"
                raise EnvironmentProblem(
                    f"{address!r}: there is no program {name}: install it, or correct the command"
                )
            continue
        if not words or not Path(words[0]).is_file():
            raise EnvironmentProblem(
                f"{address}: the form is sandbox:FILE.py ARGUMENTS, with the file of the server"
            )
        try:
            _command(address)
        except SandboxUnavailable as error:
            raise EnvironmentProblem(f"{address}: {error}") from error


def _show_tools(by_template: bool, sample: Sample, schemas: list[Tool]) -> None:
    """Put the tools into the prompt, unless the sample has them there already."""
    if sample.tokens:
        return
    prompt: list[Message] = sample.prompt if isinstance(sample.prompt, list) else []
    if not prompt:
        prompt = [{"role": "user", "content": sample.prompt}]
    if by_template:
        sample.metadata = {**sample.metadata, "tools": schemas}
    else:
        description = tools_in_words(schemas)
        if prompt[0].get("role") == "system":
            known = str(prompt[0]["content"])
            prompt = prompt[1:]
            # A discarded response leaves the prompt as it is: it has the words already.
            description = known if known.endswith(description) else f"{known}\n\n{description}"
        prompt = [{"role": "system", "content": description}, *prompt]
    sample.prompt = prompt
