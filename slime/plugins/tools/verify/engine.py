"""The log-probs of an inference server for the fixed batch."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from slime.config.args import Args
from slime.engines.background import run
from slime.engines.handle import EngineHandle
from slime.engines.launch import EngineSettings, plan_engines, start_engine
from slime.plugins.tools.verify.batch import RandomSample
from slime.weights.audit import score

START_SECONDS = 300.0


def engine_log_probs(
    model: Path, engine: str, samples: list[RandomSample], logs: Path, trust_remote_code: bool = False
) -> dict[int, Tensor]:
    """Start a server with the model, and return its log-probs by position, float32 ``[response_length]``.

    Args:
        engine: ``embedded`` or ``sglang``.
        logs: The folder for the log of the server.
    """
    values = {"hf_checkpoint": str(model), "rollout_backend": engine, "rollout_dtype": "float32", "deterministic": True}
    values |= {"rollout_num_gpus": 1, "rollout_num_gpus_per_engine": 1, "threads_per_process": 1}
    values |= {"trust_remote_code": trust_remote_code}
    args = Args().with_values(**values)
    process = start_engine(EngineSettings.from_args(args), plan_engines(args)[0], log_path=logs / f"{engine}.log")
    try:
        process.wait_ready(START_SECONDS)
        handle = EngineHandle(process.url)
        found = {}
        for position, sample in enumerate(samples):
            scored = run(score(handle, sample["tokens"]))
            found[position] = torch.tensor(scored[-len(sample["mask"]) :])
        return found
    finally:
        process.stop()
