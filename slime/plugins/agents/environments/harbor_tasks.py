"""Folders in Harbor's task format: what they contain, and which of them slime's sandbox can run."""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from posixpath import join, normpath
from typing import Any

from ..sandbox import Limits
from . import EnvironmentProblem

WORKDIR = "/app"
"""Working directory of a task that names none."""
_SYSTEM = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib64",
    "/etc",
    "/dev",
    "/proc",
    "/logs",
    "/tests",
    "/tmp",
)
_LARGEST_DISK = 1 << 30  # bytes of memory, because the files of the sandbox are there

_UNSUPPORTED = (
    ("steps", "it has several steps"),
    ("environment.mcp_servers", "it has MCP servers"),
    ("environment.healthcheck", "it has a health check"),
    ("environment.skills_dir", "it brings skills"),
    ("environment.gpus", "it needs GPUs"),
    ("environment.tpu", "it needs TPUs"),
    ("environment.allow_internet", "it needs the network"),
    ("verifier.environment", "its verifier has an environment of its own"),
    ("verifier.collect", "its verifier collects from services"),
)
"""Entries of task.toml that the sandbox cannot honour, and what they mean."""
_ALLOWED = {
    "environment.os": ("linux",),
    "environment.network_mode": ("no-network",),
    "agent.network_mode": ("no-network",),
    "verifier.network_mode": ("no-network",),
    "verifier.environment_mode": ("shared",),
}
"""Entries of task.toml that may have these values only."""


@dataclass(frozen=True)
class HarborTask:
    """One task.

    Attributes:
        path: Its folder.
        copies: Pairs of a path in ``environment/`` and an absolute path in the sandbox, as COPY has
            them.
        folders: What the model may write to; the first is the working directory.
        agent_seconds, verifier_seconds: Deadlines of the model's work and of the tests; None: none
            of the task's own.
        environment, verifier_environment: Variables of all commands, and of the tests.
        resources: ``memory_mb`` and ``storage_mb``, where the task limits them.
    """

    path: Path
    instruction: str
    copies: tuple[tuple[str, str], ...] = ()
    folders: tuple[str, ...] = (WORKDIR,)
    agent_seconds: float | None = None
    verifier_seconds: float = 600.0
    environment: Mapping[str, str] = field(default_factory=dict)
    verifier_environment: Mapping[str, str] = field(default_factory=dict)
    resources: Mapping[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.path.name

    def limits(self, limits: Limits, seconds: float) -> Limits:
        """Return the limits of the task's sandbox."""
        memory = self.resources.get("memory_mb", limits.memory_bytes >> 20) << 20
        disk = self.resources.get("storage_mb", limits.disk_bytes >> 20) << 20
        return replace(
            limits, seconds=seconds, memory_bytes=memory, disk_bytes=min(disk, _LARGEST_DISK)
        )

    def files(self) -> dict[str, bytes]:
        """Return the files of the environment by their paths in the sandbox."""
        found: dict[str, bytes] = {}
        for source, target in self.copies:
            found |= self._content(self.path / "environment", source, target)
        return found

    def tests(self) -> dict[str, bytes]:
        """Return the files of the tests by their paths in the sandbox."""
        return self._content(self.path / "tests", ".", "/tests/")

    def _content(self, context: Path, source: str, target: str) -> dict[str, bytes]:
        start = context / source
        into = start.is_dir() or target.endswith("/")
        found: dict[str, bytes] = {}
        for path in _plain_files(start):
            # The folder comes from others: a link in it must not give away a file of this machine.
            if not path.resolve().is_relative_to(context.resolve()):
                raise EnvironmentProblem(f"{path} leads out of {context}")
            inside = path.relative_to(start) if start.is_dir() else Path(path.name)
            found[normpath(join(target, str(inside))) if into else target] = path.read_bytes()
        return found


def _plain_files(start: Path) -> Iterator[Path]:
    if not start.is_dir():
        yield start
        return
    for path in sorted(start.rglob("*")):
        if path.is_symlink() or path.is_file():
            yield path


def read_tasks(what: str, most: int, own: bool = True) -> list[HarborTask]:
    """Read a task, or a folder of tasks, of which the first ``most`` (0: all) are returned.

    Args:
        own: Whether slime runs them; the package runs all that it can read itself.

    Raises:
        EnvironmentProblem: There is none, or one cannot be read or run.
    """
    folder = Path(what)
    paths = [folder] if (folder / "task.toml").is_file() else sorted(folder.glob("*/task.toml"))
    paths = [path if path == folder else path.parent for path in paths][: most or None]
    if not paths:
        raise EnvironmentProblem(
            f"harbor:{what}: neither {folder / 'task.toml'} nor {folder / '*/task.toml'} exists"
        )
    tasks: list[HarborTask] = []
    problems: list[str] = []
    for path in paths:
        try:
            tasks.append(_read(path, own))
        except (EnvironmentProblem, OSError, ValueError) as error:
            problems.append(f"{path}: {error}")
    if problems:
        more = f"\nand {len(problems) - 5} others" if len(problems) > 5 else ""
        raise EnvironmentProblem(f"harbor:{what}: " + "\n".join(problems[:5]) + more)
    return tasks


def _read(path: Path, own: bool) -> HarborTask:
    config = tomllib.loads((path / "task.toml").read_text(encoding="utf-8"))
    instruction = (path / "instruction.md").read_text(encoding="utf-8")
    if not own:
        return HarborTask(path.resolve(), instruction)
    _refuse(path, config)
    settings = config.get("environment", {})
    dockerfile = path / "environment" / "Dockerfile"
    # Without a Dockerfile, the files are in the working directory.
    workdir = WORKDIR
    copies = [(".", ".")] if (path / "environment").is_dir() else []
    variables: dict[str, str] = {}
    if dockerfile.is_file():
        workdir, copies, variables = _dockerfile(dockerfile)
    workdir = settings.get("workdir") or workdir
    placed = tuple((source, join(workdir, target)) for source, target in copies)
    written = (_folder_of(path / "environment", source, target) for source, target in placed)
    folders = tuple(dict.fromkeys([normpath(workdir), *written]))
    for folder in folders:
        if folder == "/" or f"{folder}/".startswith(tuple(f"{name}/" for name in _SYSTEM)):
            raise EnvironmentProblem(
                f"it puts files into {folder}, which the sandbox does not let it write to"
            )
    verifier = config.get("verifier", {})
    return HarborTask(
        path.resolve(),
        instruction,
        placed,
        folders,
        config.get("agent", {}).get("timeout_sec"),
        float(verifier.get("timeout_sec", 600.0)),
        {**variables, **settings.get("env", {})},
        verifier.get("env", {}),
        {name: settings[name] for name in ("memory_mb", "storage_mb") if name in settings},
    )


def _folder_of(context: Path, source: str, target: str) -> str:
    """The folder that a copy writes to."""
    into = (context / source).is_dir() or target.endswith("/")
    return normpath(target if into else join(target, ".."))


def _refuse(path: Path, config: Mapping[str, Any]) -> None:
    """Raise an :class:`EnvironmentProblem` if the sandbox cannot run the task as it is meant."""
    for key, meaning in _UNSUPPORTED:
        if _entry(config, key):
            raise EnvironmentProblem(f"{meaning} ({key}): run it with the package (program=...)")
    for key, allowed in _ALLOWED.items():
        value = _entry(config, key)
        if value is not None and str(value).lower() not in allowed:
            raise EnvironmentProblem(
                f"{key} = {value!r}: the sandbox has only {', '.join(allowed)}; run it with the "
                "package (program=...)"
            )
    for section in ("environment", "verifier"):
        for name, value in (_entry(config, f"{section}.env") or {}).items():
            if "${" in value:
                raise EnvironmentProblem(
                    f"{section}.env.{name} = {value!r}: no variable of this machine goes into the "
                    "sandbox"
                )
    environment = path / "environment"
    image = _entry(config, "environment.docker_image") or (environment / "Dockerfile").is_file()
    if (environment / "docker-compose.yaml").is_file():
        raise EnvironmentProblem("it has services (docker-compose.yaml): run it with the package")
    if image and _entry(config, "metadata.needs_image") is not False:
        raise EnvironmentProblem(
            "it has a container image. If its tests need nothing of that image, write needs_image = "
            "false under [metadata] of task.toml; or run it with the package (program=...)"
        )
    if not (path / "tests" / "test.sh").is_file():
        raise EnvironmentProblem("it has no tests/test.sh")


def _entry(config: Mapping[str, Any], key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _dockerfile(path: Path) -> tuple[str, list[tuple[str, str]], dict[str, str]]:
    """Return the working directory, the copies and the variables of a Dockerfile whose image is not
    needed.

    Raises:
        EnvironmentProblem: It has an instruction that only the building of an image can follow.
    """
    workdir = WORKDIR
    copies: list[tuple[str, str]] = []
    variables: dict[str, str] = {}
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    for line in filter(None, map(str.strip, text.splitlines())):
        name, *words = shlex.split(line, comments=True) or [""]
        match name.upper():
            case "" | "FROM":
                continue
            case "WORKDIR" if len(words) == 1:
                workdir = join(workdir, words[0])
            case "COPY" if len(words) > 1 and not any(set("*?[") & set(word) for word in words):
                if not words[0].startswith("--"):
                    target = join(workdir, words[-1])
                    if len(words) > 2 or normpath(target) == normpath(workdir):
                        target += "/"
                    copies += [(source.lstrip("/"), target) for source in words[:-1]]
                    continue
            case "ENV" if words and all("=" in word for word in words):
                variables |= dict(word.split("=", 1) for word in words)
                continue
        if name.upper() != "WORKDIR":
            raise EnvironmentProblem(
                f"environment/Dockerfile: {line!r} needs an image; slime follows WORKDIR, ENV and "
                "COPY without options and patterns. Run it with the package (program=...)"
            )
    return workdir, copies, variables
