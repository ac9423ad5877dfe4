"""The file that ``slime launch`` reads (a job, and the flags of its run), and what it writes: a batch job
of Slurm, a RayJob of KubeRay (Kubernetes), or a task of SkyPilot.

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

import importlib.metadata
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

import yaml

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


STOP_SECONDS = 600
"""How long before its time limit the job is told to stop, so that it can save."""

_SCRIPT = Template(r"""#!/usr/bin/env bash
#SBATCH --job-name=$name
#SBATCH --nodes=$nodes
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=$gpus
#SBATCH --time=$minutes
#SBATCH --signal=B:TERM@$stop
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=$name-%j.log
$more
# Written by `slime launch slurm`. Ten minutes before the time limit the run saves a snapshot and ends;
# the job is queued again and goes on from there.
set -euo pipefail
$preparation

# --- a Ray cluster over all nodes, which only this job's token opens ---
mapfile -t nodes < <(scontrol show hostnames "$$SLURM_JOB_NODELIST")
on() { srun --overlap --nodes=1 --ntasks=1 --nodelist="$$1" "$${@:2}"; }
address="$$(on "$${nodes[0]}" hostname --ip-address | awk '{print $$1}')"
export RAY_ADDRESS="$$address:$${RAY_PORT:-6379}" RAY_AUTH_MODE=token
RAY_AUTH_TOKEN="$$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')"
export RAY_AUTH_TOKEN
ray_flags=(--num-gpus=$gpus --disable-usage-stats --block)
on "$${nodes[0]}" ray start --head --node-ip-address="$$address" --port="$${RAY_ADDRESS##*:}" "$${ray_flags[@]}" &
for node in "$${nodes[@]:1}"; do
    on "$$node" ray start --address="$$RAY_ADDRESS" "$${ray_flags[@]}" &
done
python -m slime.plugins.launch.wait_for_nodes $nodes

# --- the run ---
stopped=""
$command &
driver=$$!
trap 'stopped=yes; kill -TERM "$$driver"' TERM
status=0
wait "$$driver" || status=$$?
# A signal ends `wait`, not the driver, which still saves.
while kill -0 "$$driver" 2>/dev/null; do
    status=0
    wait "$$driver" || status=$$?
done
if [ -n "$$stopped" ] && [ "$$status" -ne 0 ]; then
    scontrol requeue "$$SLURM_JOB_ID"
fi
exit "$$status"
""")


def sbatch_script(job: Job) -> str:
    """Return the batch script of a job."""
    return _SCRIPT.substitute(
        name=job.name,
        nodes=job.nodes,
        gpus=job.gpus_per_node,
        minutes=max(int(job.hours * 60), 1),
        stop=STOP_SECONDS,
        more="\n".join(f"#SBATCH {option}" for option in job.slurm),
        preparation=job.preparation,
        command=job.command,
    )


def rayjob(job: Job) -> str:
    """Return the manifest of a RayJob: a head and ``nodes - 1`` workers with ``gpus_per_node`` GPUs
    each. A job that fails is tried again twice, from its newest snapshot.

    Raises:
        CommandError: The file has no ``image``.
    """
    if not job.image:
        raise CommandError("job.image is missing: pods need an image that holds slime")
    group = {"rayStartParams": {"num-gpus": str(job.gpus_per_node)}, "template": _pod(job)}
    workers = [
        {"groupName": "gpu", "replicas": n, "minReplicas": n, "maxReplicas": n, **group}
        for n in [job.nodes - 1]
        if n
    ]
    script = f"{job.preparation}\nexec {job.command}\n"
    spec: dict[str, object] = {
        "entrypoint": f"bash -c {shlex.quote(script)}",
        "shutdownAfterJobFinishes": True,
        "activeDeadlineSeconds": int(job.hours * 3600),
        "backoffLimit": 2,
        "rayClusterSpec": {
            "rayVersion": importlib.metadata.version("ray"),
            "authOptions": {"mode": "token"},  # KubeRay 1.5 and newer
            "headGroupSpec": group,
            **({"workerGroupSpecs": workers} if workers else {}),
        },
    }
    manifest = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"generateName": f"{job.name}-"},
        "spec": spec,
    }
    return _dump(manifest)


def _pod(job: Job) -> dict[str, Any]:
    resources = {"nvidia.com/gpu": job.gpus_per_node} if job.gpus_per_node else {}
    mounts = list((job.mounts or {}).items())
    container = {
        "name": "ray",
        "image": job.image,
        "env": [{"name": k, "value": str(v)} for k, v in (job.env or {}).items()],
        "resources": {"limits": resources, "requests": resources},
        # NCCL and the shared memory of Ray need more than the 64 MiB that a pod has by default.
        "volumeMounts": [
            {"name": "shm", "mountPath": "/dev/shm"},
            *({"name": f"data-{i}", "mountPath": path} for i, (path, _) in enumerate(mounts)),
        ],
    }
    volumes = [
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
        *(
            {"name": f"data-{i}", "persistentVolumeClaim": {"claimName": claim}}
            for i, (_, claim) in enumerate(mounts)
        ),
    ]
    return {"spec": {**(job.pod or {}), "containers": [container], "volumes": volumes}}


_SKY = """\
head="$(head -n 1 <<<"$SKYPILOT_NODE_IPS")"
# SkyPilot has a Ray of its own on port 6380.
export RAY_ADDRESS="$head:6379"
# SkyPilot's nodes have a network of their own.
export RAY_AUTH_MODE="${RAY_AUTH_MODE:-disabled}"
flags="--num-gpus=$SKYPILOT_NUM_GPUS_PER_NODE --disable-usage-stats"
if [ "$SKYPILOT_NODE_RANK" -ne 0 ]; then
    until ray start --address="$RAY_ADDRESS" $flags --block; do
        sleep 5
    done
    exit
fi
ray start --head --node-ip-address="$head" --port=6379 $flags
python -m slime.plugins.launch.wait_for_nodes "$SKYPILOT_NUM_NODES"
"""


def sky_task(job: Job) -> str:
    """Return the YAML of a SkyPilot task."""
    resources: dict[str, object] = {}
    if job.gpus_per_node:
        resources["accelerators"] = f"{job.gpu}:{job.gpus_per_node}"
    if job.image:
        resources["image_id"] = f"docker:{job.image}"
    task = {
        "name": job.name,
        "num_nodes": job.nodes,
        "resources": resources,
        "envs": {name: str(value) for name, value in (job.env or {}).items()},
        "run": f"{job.preparation}\n{_SKY}exec {job.command}\n",
    }
    return _dump({key: value for key, value in task.items() if value})


class _Dumper(yaml.SafeDumper):
    """Writes scripts as blocks, and nothing as a reference to an earlier part."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def _dump(content: object) -> str:
    text = yaml.dump(content, Dumper=_Dumper, sort_keys=False, width=100)
    return f"# Written by `slime launch`.\n{text}"
