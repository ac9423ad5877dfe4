"""The agent API of older releases: sandboxes, harnesses and a server on a thread, over the sandbox and
the endpoints of :mod:`slime.plugins.agents`.

Names and meanings are those of slime 0.3. The arguments that it does not document are chosen here,
and have keywords.
"""

from __future__ import annotations

import base64
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from aiohttp import web

from slime.engines.background import run
from slime.plugins.agents.box import LocalBox
from slime.plugins.agents.sandbox import Limits
from slime.plugins.http.server import listen

HOME = "/sandbox"
"""The folder of a sandbox, whose files are kept."""
LIMITS = Limits(
    memory_bytes=2 << 30, output_bytes=64 << 20, disk_bytes=256 << 20, open_files=256, tasks=64
)
_LONGEST = 86_400.0  # seconds; each command has a deadline of its own
_MOST_BYTES = 90_000


@dataclass(frozen=True)
class Executed:
    """The end of a command: its exit status (124 after its time limit) and its output."""

    exit_code: int
    stdout: str
    stderr: str


class E2BSandbox:
    """A sandbox in the form of E2B's, for ``async with``: the namespace sandbox of this machine, which
    has no network.

    Between two commands it is only the files of its folder ``/sandbox``, where commands begin: no
    process stays. For a provider's sandboxes derive from this class and override its methods.

    Args:
        template: Has no meaning here; a provider's class may read it.
        timeout: The longest time of a command in seconds.
        envs: Variables of each command.
        limits: Other limits of each command; see :class:`slime.plugins.agents.sandbox.Limits`.
    """

    def __init__(
        self,
        template: str | None = None,
        *,
        timeout: float = 60.0,
        envs: Mapping[str, str] | None = None,
        limits: Limits = LIMITS,
    ) -> None:
        self.template = template
        self.timeout = timeout
        self.limits = replace(limits, children=True, seconds=_LONGEST)
        self._envs = dict(envs or {})
        self._box: LocalBox | None = None

    async def __aenter__(self) -> Self:
        """Open the sandbox.

        Raises:
            SandboxUnavailable: This machine cannot isolate processes.
        """
        self._box = LocalBox(self.limits, (HOME,))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._box = None

    async def exec(
        self,
        command: str,
        *,
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> Executed:
        """Run a command of the shell and wait for its end. If its files do not fit, the command
        fails and they are as before.

        Raises:
            RuntimeError: The sandbox is not open.
        """
        if self._box is None:
            raise RuntimeError("the sandbox is not open: use it in `async with`")
        line = f"cd {shlex.quote(cwd or HOME)} || exit\n{command}"
        variables = {"HOME": HOME, **self._envs, **(env or {})}
        ran = await self._box.run(line, timeout or self.timeout, environment=variables)
        result = ran.result
        code = 124 if result.status == "timeout" else result.exit_code
        return Executed(code, result.stdout, result.stderr)

    async def write_file(self, path: str, content: str | bytes) -> None:
        """Write a file, of which the folder is made."""
        data = content.encode() if isinstance(content, str) else content
        place = shlex.quote(path)
        # A variable has at most 128 KiB.
        for start in range(0, max(len(data), 1), _MOST_BYTES):
            text = base64.b64encode(data[start : start + _MOST_BYTES]).decode()
            first = f'mkdir -p "$(dirname {place})" && : > {place} &&' if not start else ""
            line = f'{first} printf %s "$DATA" | base64 -d >> {place}'
            done = await self.exec(line, env={"DATA": text})
            if done.exit_code:
                raise OSError(f"{path} was not written: {done.stderr[-500:]}")

    async def read_file(self, path: str) -> str:
        """Return the text of a file.

        Raises:
            FileNotFoundError: There is none.
        """
        done = await self.exec(f"cat {shlex.quote(path)}")
        if done.exit_code:
            raise FileNotFoundError(path)
        return done.stdout


async def exec_and_wait(
    sandbox: E2BSandbox,
    command: str,
    *,
    timeout: float | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
) -> Executed:
    """Run a long command and wait for its end; no connection has to stay open here, so this is
    ``exec``.
    """
    return await sandbox.exec(command, timeout=timeout, env=env, cwd=cwd)


class Harness:
    """A coding agent as a command in a sandbox, which is any object with ``exec``, ``write_file``
    and ``read_file``.

    Attributes:
        install: The command that installs it, run if ``program`` is not there.
        program: The name of its program.
        command: The command that runs it; ``{prompt}`` is the quoted task.
        config: Files by path, which may contain ``{base_url}``, ``{api_key}`` and ``{model}``.
    """

    install = "true"
    program = "true"
    command = "true {prompt}"
    config: Mapping[str, str] = {}

    async def install_cli(self, sandbox: E2BSandbox) -> None:
        """Install the program.

        Raises:
            RuntimeError: It failed.
        """
        line = f"command -v {shlex.quote(self.program)} >/dev/null || {{ {self.install}\n}}"
        done = await exec_and_wait(sandbox, line)
        if done.exit_code:
            raise RuntimeError(
                f"{self.install!r} ended with {done.exit_code}: {done.stderr[-500:]}"
            )

    async def write_config(
        self, sandbox: E2BSandbox, *, base_url: str, api_key: str, model: str = "slime"
    ) -> None:
        """Write the files of the agent."""
        values = {"{base_url}": base_url, "{api_key}": api_key, "{model}": model}
        for path, text in self.config.items():
            for name, value in values.items():
                text = text.replace(name, value)
            await sandbox.write_file(path, text)

    async def launch_and_wait(
        self,
        sandbox: E2BSandbox,
        prompt: str,
        *,
        timeout: float | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Executed:
        """Run the agent on a task, and wait for its end."""
        line = self.command.replace("{prompt}", shlex.quote(prompt))
        return await exec_and_wait(sandbox, line, timeout=timeout, env=env)

    async def run(
        self,
        sandbox: E2BSandbox,
        prompt: str,
        *,
        base_url: str,
        api_key: str,
        model: str = "slime",
        timeout: float | None = None,
    ) -> Executed:
        """Install, configure and run the agent, which finds the endpoint in its variables."""
        await self.install_cli(sandbox)
        await self.write_config(sandbox, base_url=base_url, api_key=api_key, model=model)
        env = {
            "OPENAI_BASE_URL": f"{base_url}/v1", "OPENAI_API_KEY": api_key, "OPENAI_MODEL": model,
            "ANTHROPIC_BASE_URL": base_url, "ANTHROPIC_API_KEY": api_key, "ANTHROPIC_MODEL": model,
        }  # fmt: skip
        return await self.launch_and_wait(sandbox, prompt, timeout=timeout, env=env)


class ThreadedServer:
    """Serves an aiohttp application on the background thread of slime, for ``with``.

    Args:
        app: Such as ``adapter.app``.
        host: The address on which it listens.
        port: Its port; 0 for a free one.

    Attributes:
        url: Its address, ``http://host:port``.
    """

    def __init__(self, app: web.Application, host: str = "127.0.0.1", port: int = 0) -> None:
        self._runner = web.AppRunner(app)
        self._host = host
        self._port = port
        self.url = ""

    def start(self) -> Self:
        """Start to listen."""
        port = run(listen(self._runner, self._host, self._port))
        self.url = f"http://{self._host}:{port}"
        return self

    def stop(self) -> None:
        """Close all connections."""
        run(self._runner.cleanup())

    __enter__ = start

    def __exit__(self, *_: object) -> None:
        self.stop()
