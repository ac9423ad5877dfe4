"""A run as a RayJob of KubeRay (Kubernetes), and as a task of SkyPilot."""

from __future__ import annotations

import importlib.metadata
import shlex
from typing import Any

import yaml

from slime.cli.command import CommandError
from slime.plugins.launch.run_file import Job


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
