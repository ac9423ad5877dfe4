"""Small functions of older releases that scripts and logging functions call.

What takes long to import is imported in functions: clients of engines import this module, too.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, SupportsFloat, TypeVar

from slime.cli.main import LOOPS
from slime.config.observability import ObservabilityConfig

if TYPE_CHECKING:
    from slime.config.args import Args
    from slime.data.sample import Sample
    from slime.rollout.metrics import Metrics

T = TypeVar("T")
MODELS = Path(__file__).resolve().parents[3] / "scripts" / "models"
"""The files that define ``MODEL_ARGS``."""


def execute_train(
    train_args: str,
    num_gpus_per_node: int | None = None,
    megatron_model_type: str | None = None,
    train_script: str = "train.py",
    before_ray_job_submit: Callable[[], object] | None = None,
    extra_env_vars: Mapping[str, str] | None = None,
) -> None:
    """Run a training as bash reads its flags, and wait for its end.

    Args:
        train_args: The flags as one text.
        num_gpus_per_node: Has no effect: Ray reports the GPUs of each node.
        megatron_model_type: The name of a file of ``scripts/models``, whose MODEL_ARGS come first.
        train_script: ``train.py``, ``train_async.py``, or the path of a loop of your own.
        before_ray_job_submit: Called before the start.
        extra_env_vars: Added to the environment.

    Raises:
        FileNotFoundError: There is no file for the model.
        subprocess.CalledProcessError: The training failed.
    """
    command = next((name for name, file in LOOPS.items() if file == train_script), None)
    words = ["-m", "slime.cli.main", command] if command else [train_script]
    program = shlex.join([sys.executable, *words])
    if megatron_model_type is not None:
        model = MODELS / f"{megatron_model_type}.sh"
        if not model.is_file():
            raise FileNotFoundError(f"{model}: no such model; the models are the files beside it")
        program = f'source {shlex.quote(str(model))}\n{program} "${{MODEL_ARGS[@]}}"'
    if before_ray_job_submit is not None:
        before_ray_job_submit()
    flags = " ".join(train_args.split("\n"))
    subprocess.run(
        ["bash", "-c", f"set -e\n{program} {flags}"],
        check=True,
        env={**os.environ, **(extra_env_vars or {})},
    )


def compute_perf_metrics_from_samples(
    args: Args, samples: Sequence[Sample], rollout_time: float
) -> Metrics:
    """Return the metrics ``perf/…`` of a rollout that took ``rollout_time`` seconds, without that
    prefix.
    """
    from slime.rollout.metrics import rollout_metrics

    found = rollout_metrics(
        args.section(ObservabilityConfig),
        args.reward_key,
        samples,
        rollout_time,
        args.rollout_num_gpus or 0,
    )
    prefix = "perf/"
    return {
        name.removeprefix(prefix): value for name, value in found.items() if name.startswith(prefix)
    }


class TensorboardAdapter:
    """Adds metrics to those of the run, whose events TensorBoard reads; see
    :func:`slime.observability.logging_utils.log`.
    """

    def __init__(self, args: Args) -> None:
        self._args = args

    def log(self, data: Mapping[str, SupportsFloat], step: int | None = None) -> None:
        """Add metrics. The run knows its step, so ``step`` is not read."""
        from slime.observability.logging_utils import log

        log(self._args, data)


class Box(Generic[T]):
    """Holds one object. Ray passes a box as an argument as it is, where it would resolve a bare
    object reference.
    """

    def __init__(self, inner: T) -> None:
        self._inner = inner

    @property
    def inner(self) -> T:
        return self._inner


def exec_command(cmd: str, capture_output: bool = False) -> str | None:
    """Run a command of bash, and return its output if ``capture_output`` is set.

    Raises:
        subprocess.CalledProcessError: The command failed.
    """
    done = subprocess.run(
        ["bash", "-c", cmd],
        check=True,
        text=True,
        stdout=subprocess.PIPE if capture_output else None,
    )
    return done.stdout if capture_output else None


class SingletonMeta(type):
    """Metaclass of classes with one instance per process, which the first call creates.

    It is for plugins; slime itself passes objects as arguments. :meth:`clear` is for tests.
    """

    _instances: dict[type, Any] = {}  # noqa: RUF012  # shared by all classes on purpose
    _lock = threading.RLock()

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        with SingletonMeta._lock:
            if cls not in SingletonMeta._instances:
                SingletonMeta._instances[cls] = super().__call__(*args, **kwargs)
            return SingletonMeta._instances[cls]

    def clear(cls) -> None:
        """Remove the instance of this class, so that the next call creates a new one."""
        with SingletonMeta._lock:
            SingletonMeta._instances.pop(cls, None)
