"""The file that ``slime launch`` reads: a job, and the flags of its run.

.. code-block:: yaml

    job:
      name: qwen3-4b
      nodes: 2
      gpus_per_node: 8
      hours: 12
      workdir: /shared/slime          # the same folder on all nodes
      setup: [source /shared/env/bin/activate]
      env: {NCCL_SOCKET_IFNAME: eth0}
    run:
      hf_checkpoint: /shared/Qwen3-4B
      save: /shared/runs/qwen3-4b
      colocate: true
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.cli.command import CommandError

_TEXTS: dict[str, object] = {"type": "array", "items": {"type": "string"}}
_JOB: dict[str, object] = {
    "name": {"type": "string", "pattern": "^[a-z0-9]([a-z0-9-]*[a-z0-9])?$", "maxLength": 40},
    "nodes": {"type": "integer", "minimum": 1},
    "gpus_per_node": {"type": "integer", "minimum": 0},
    "hours": {"type": "number", "exclusiveMinimum": 0},
    "workdir": {"type": "string", "pattern": "^/"},
    "asynchronous": {"type": "boolean"},
    "setup": _TEXTS,
    "env": {"type": "object", "additionalProperties": {"type": ["string", "number"]}},
    "slurm": _TEXTS,
    "image": {"type": "string"},
    "gpu": {"type": "string"},
    "pod": {"type": "object"},
    "mounts": {"type": "object", "additionalProperties": {"type": "string"}},
}
SCHEMA: dict[str, object] = {
    "type": "object",
    "required": ["job", "run"],
    "additionalProperties": False,
    "properties": {
        "job": {
            "type": "object",
            "required": ["name", "nodes", "gpus_per_node", "hours", "workdir"],
            "additionalProperties": False,
            "properties": _JOB,
        },
        "run": {"type": "object", "required": ["save"]},
    },
}


@dataclass(frozen=True)
class Job:
    """A run and where it runs.

    Attributes:
        name: Of the job; lower-case letters, digits and hyphens.
        hours: Its time limit.
        workdir: Absolute path of the folder where the run starts.
        words: The flags of the run, without ``--load``.
        save: ``--save``: where a job that was stopped goes on.
        asynchronous: Whether ``slime train-async`` runs instead of ``slime train``.
        setup: Lines of bash before the run, on each node.
        env: Environment variables.
        slurm: More options of ``sbatch``.
        image: The image of the containers (Kubernetes, SkyPilot).
        gpu: The kind of GPU, as SkyPilot names it.
        pod: Fields that are added to the specification of each pod, such as ``nodeSelector``.
        mounts: Persistent volume claims by the folder where the pods see them.
    """

    name: str
    nodes: int
    gpus_per_node: int
    hours: float
    workdir: str
    words: tuple[str, ...]
    save: str
    asynchronous: bool = False
    setup: tuple[str, ...] = ()
    env: Mapping[str, object] | None = None
    slurm: tuple[str, ...] = ()
    image: str = ""
    gpu: str = "H100"
    pod: Mapping[str, object] | None = None
    mounts: Mapping[str, str] | None = None

    @property
    def preparation(self) -> str:
        """The lines of bash that each node executes before anything else."""
        exports = [f"export {k}={shlex.quote(str(v))}" for k, v in (self.env or {}).items()]
        return "\n".join([f"cd {shlex.quote(self.workdir)}", *exports, *self.setup])

    @property
    def command(self) -> str:
        """The line that starts the run, or goes on from its newest snapshot if there is one."""
        loop = "train-async" if self.asynchronous else "train"
        tracker = shlex.quote(f"{self.save}/latest_checkpointed_iteration.txt")
        load = f"$([ -e {tracker} ] && echo --load {shlex.quote(self.save)})"
        return f"python -m slime.cli.main {loop} {shlex.join(self.words)} {load}"


def read_run_file(file: Path) -> Job:
    """Read and check a file; see the docstring of this module.

    Raises:
        CommandError: The file cannot be read, a key is missing or unknown, or a flag does not exist.
    """
    from slime.config.files import form_problems, load_yaml
    from slime.config.parser import read_command_line

    try:
        content = load_yaml(file)
    except (OSError, ValueError) as error:
        raise CommandError(f"cannot read {file}: {error}") from error
    problems = form_problems(content, SCHEMA)
    if not problems:
        words = flag_words(content["run"])
        problems = read_command_line(words)[1]
        if " " in str(content["run"]["save"]):
            problems.append("run.save: the path has a space, which the job's shell would split")
    if problems:
        raise CommandError(f"{file}: " + "; ".join(problems))
    given: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in content["job"].items()
    }
    return Job(**given, words=tuple(words), save=str(content["run"]["save"]))


def flag_words(flags: Mapping[str, Any]) -> list[str]:
    """Return flags of a YAML mapping as words of a command line: ``true`` is the flag alone,
    ``false`` its ``--no-`` form, a list several values.
    """
    words: list[str] = []
    for name, value in flags.items():
        option = str(name).replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        else:
            words += [f"--{option}", *map(str, value if isinstance(value, list) else [value])]
    return words
