"""Parts for the package harbor that need no container engine and no agent of others: its tasks run
in slime's sandbox, and its agent runs what the model writes.

    harbor trial start --env harbor_parts:BoxEnvironment --agent harbor_parts:ShellAgent ...
"""

from __future__ import annotations

import json
import os
import urllib.request
from pathlib import Path
from typing import Any

from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities

from slime.plugins.agents.box import LIMITS, LocalBox


class BoxEnvironment(BaseEnvironment):  # type: ignore[misc]
    """A box of slime's with the folders of a container."""

    @staticmethod
    def type() -> str:
        return "slime"

    @property
    def capabilities(self) -> Any:
        return EnvironmentCapabilities(disable_internet=True)

    def _validate_definition(self) -> None:
        pass

    async def start(self, force_build: bool) -> None:
        self.box = LocalBox(LIMITS, ["/app", "/logs", "/tests", "/solution"])
        await self.upload_dir(self.environment_dir, "/app")
        await self.exec("mkdir -p /logs/agent /logs/verifier /logs/artifacts")

    async def stop(self, delete: bool) -> None:
        await self.box.close()

    async def upload_file(self, source_path: Any, target_path: str) -> None:
        await self.box.run("true", 10, put={target_path: Path(source_path).read_bytes()})

    async def upload_dir(self, source_dir: Any, target_dir: str) -> None:
        files = [path for path in Path(source_dir).rglob("*") if path.is_file()]
        names = {path: f"{target_dir}/{path.relative_to(source_dir)}" for path in files}
        await self.box.run("true", 10, put={names[path]: path.read_bytes() for path in files})

    async def download_file(self, source_path: str, target_path: Any) -> None:
        data = (await self.box.run("true", 10, get=[source_path])).files[source_path]
        if data is None:
            raise FileNotFoundError(source_path)
        Path(target_path).parent.mkdir(parents=True, exist_ok=True)
        Path(target_path).write_bytes(data)

    async def download_dir(self, source_dir: str, target_dir: Any) -> None:
        listed = await self.exec(f"cd {source_dir} && find . -type f")
        for name in (listed.stdout or "").split():
            await self.download_file(f"{source_dir}/{name}", Path(target_dir) / name)

    async def exec(
        self, command: str, cwd: Any = None, env: Any = None, timeout_sec: Any = None, **_: Any
    ) -> Any:
        where = f"cd {cwd} && " if cwd else ""
        ran = await self.box.run(where + command, timeout_sec or 60, environment=env)
        result = ran.result
        return ExecResult(stdout=result.stdout, stderr=result.stderr, return_code=result.exit_code)


class ShellAgent(BaseAgent):  # type: ignore[misc]
    """Asks the model once, and runs its answer as a command."""

    @staticmethod
    def name() -> str:
        return "shell"

    def version(self) -> str:
        return "1"

    async def setup(self, environment: Any) -> None:
        pass

    async def run(self, instruction: str, environment: Any, context: Any) -> None:
        body = {"model": "slime", "messages": [{"role": "user", "content": instruction}]}
        request = urllib.request.Request(
            f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
            json.dumps(body).encode(),
            {
                "Content-Type": "application/json",
                "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
            },
        )
        with urllib.request.urlopen(request) as answer:
            said = json.load(answer)["choices"][0]["message"]["content"]
        await environment.exec(said)
