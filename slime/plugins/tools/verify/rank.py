"""The work of one training rank for ``slime verify``."""

from __future__ import annotations

import gc
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slime.backends.base import TrainBackend
from slime.backends.create import create_backend
from slime.backends.train_loop import train_on_rollout
from slime.config.args import Args
from slime.plugins.tools.local_ranks import Place
from slime.plugins.tools.verify.reference import Scores, batch_of_rank

LARGE = 1e6
STEP = 16.0
"""One step of Adam with an epsilon of :data:`LARGE` and a learning rate of ``LARGE · STEP`` changes
each weight by ``-STEP · gradient`` (its relative error is |gradient| / ``LARGE``). So the change of
the weights shows the gradient that the whole path has computed, with every sum over ranks, in the
same way for every backend and layout."""


@dataclass(frozen=True)
class VerifyJob:
    """What the ranks have to do.

    Attributes:
        model: The cut-down model, of which everything is computed.
        variants: Further models, of which only the log-probs are.
        groups: The number of groups in the batch.
    """

    backend: str
    megatron: dict[str, Any]
    flags: dict[str, Any]
    model: Path
    variants: tuple[Path, ...] = ()


def settings(job: VerifyJob, model: Path, world_size: int) -> Args:
    """Return the settings of a run that trains one step on the fixed batch in float32."""
    values: dict[str, Any] = {
        "hf_checkpoint": str(model),
        "ref_load": str(model),
        "train_backend": job.backend,
        "train_dtype": "float32",
        "attn_implementation": None,
        "num_rollout": 10,
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 4,
        "global_batch_size": 16,
        "micro_batch_size": 4,
        "eps_clip_high": 0.2,
        "kl_loss_type": "low_var_kl",
        "weight_decay": 0.0,
        "lr": LARGE * STEP,
        "adam_eps": LARGE,
        "clip_grad": 1e9,
        "deterministic": False,
        "threads_per_process": 1,
        "world_size": world_size,
        "megatron": dict(job.megatron),
    }
    return Args().with_values(**(values | job.flags))


def verify_rank(place: Place, job: VerifyJob) -> list[Scores]:
    """Return the scores of the model and of its variants on this rank. All ranks call this
    together.

    Log-probs are those of this rank's samples; weights and gradients are whole on every rank.
    """
    found = []
    for number, model in enumerate([job.model, *job.variants]):
        args = settings(job, model, place.world_size)
        backend = create_backend(
            args, "actor", place.rank, place.world_size, place.address, place.port, place.rank
        )
        found.append(_scores(backend, args, whole=number == 0))
        del backend
        leave_model()
    return found


def leave_model() -> None:
    """End the process groups that a Megatron model has made, so that another one can be built."""
    if "megatron.core" in sys.modules:
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
    gc.collect()


def _scores(backend: TrainBackend, args: Args, whole: bool) -> Scores:
    rank = backend.data_parallel_rank
    size = backend.data_parallel_size
    batch = batch_of_rank(rank, size)
    found = Scores()
    batch.pop("rollout_log_probs")  # with them, the loss would be corrected for a gap to an engine
    everyone = [
        i for i, group in enumerate(batch_of_rank(0, 1)["group_indices"]) if group % size == rank
    ]
    scored = backend.log_probs(batch, temperature=1.0)["log_probs"]
    found.log_probs = {
        position: values.cpu() for position, values in zip(everyone, scored, strict=True)
    }
    if not whole:
        return found
    # The difference of the weights is the gradient, see STEP.
    before = _weights(backend)
    metrics, _ = train_on_rollout(backend, args, batch)
    after = _weights(backend)
    found.loss = metrics["train/loss"]
    found.grad_norm = metrics["train/grad_norm"]
    found.weights = before
    found.gradients = {name: (before[name] - after[name]) / STEP for name in before}
    return found


def _weights(backend: TrainBackend) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().float().cpu().clone() for name, tensor in backend.named_weights()}
