"""The evaluation sets of a recorded run with other weights."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import yaml

from slime.config.settings import HIDDEN
from slime.models.shards import copy_side_files
from slime.observability.metrics import read_metrics
from slime.observability.run_dir import RunDir
from slime.plugins.tools.replay.recorded import RecordedRun, ReplayError, attempt_of, attempts_of

# What only a run that trains, saves or shares its folders with the recorded one has.
_NOT_OF_AN_EVALUATION = (
    "config", "load", "ckpt_step", "finetune", "ref_load", "save", "save_interval", "save_hf",
    "dump_details", "save_debug_rollout_data", "save_debug_train_data", "tracker", "certificate", "num_epoch",
    "replay_schedule", "critic_save", "skip_eval_before_train", "output_dir", "run_name",
)  # fmt: skip


def evaluated(run: RecordedRun, step: int, weights: Path) -> Mapping[str, float]:
    """Evaluate weights with the evaluation sets, the functions and the seed of a run.

    The evaluation is that of ``slime train --inline --num-rollout 0`` with the settings that were
    given to the run, in a process of its own, so the same weights have the same scores.

    Args:
        weights: A file of safetensors with all weights, under the names of the checkpoint.

    Returns:
        The metrics ``eval/…``, without lengths and times.

    Raises:
        ReplayError: The run has no evaluation sets, trains adapters, or the evaluation failed.
    """
    attempt = attempt_of(attempts_of(run.folder), step)
    recorded = attempt.settings
    if not (recorded.get("eval_prompt_data") or recorded.get("eval_config")):
        raise ReplayError("--evaluate needs a run with --eval-prompt-data or --eval-config")
    if run.args.lora_rank:
        raise ReplayError("--evaluate needs whole weights; this run trained adapters")
    # A flag that was not given has its default again.
    explicit = recorded.get("explicit")
    names = {str(name) for name in explicit} if isinstance(explicit, list) else set[str]()
    given = {
        name: value
        for name, value in recorded.items()
        if name in names.difference(_NOT_OF_AN_EVALUATION) and value not in (None, HIDDEN)
    }
    with tempfile.TemporaryDirectory(prefix="slime-evaluate-") as name:
        folder = Path(name)
        _model_folder(Path(str(run.args.hf_checkpoint)), weights, folder / "model")
        given |= {
            "hf_checkpoint": f"{name}/model",
            "output_dir": name,
            "run_name": "evaluation",
            "inline": True,
            "num_rollout": 0,
            "eval_interval": 1,
            "rollout_backend": "embedded",
        }
        path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), *run.modules)))
        _train(given, folder / "flags.yaml", attempt.settled.working_directory, path)
        rows = read_metrics(RunDir(folder / "evaluation").metrics)
    scores = next(row for row in rows if row.get("eval/step") is not None)
    return {
        name: float(value)
        for name, value in scores.items()
        if name.startswith("eval/")
        and "/" not in name[5:]
        and name != "eval/step"
        and value is not None
    }


def _train(flags: Mapping[str, object], file: Path, folder: str, path: str) -> None:
    """Run ``slime train`` in ``folder`` with the flags, and with ``path`` for modules."""
    file.write_text(yaml.safe_dump(flags), encoding="utf-8")
    finished = subprocess.run(
        [sys.executable, "-m", "slime.cli.main", "train", "--custom-config-path", str(file)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    if finished.returncode:
        said = finished.stdout + finished.stderr
        raise ReplayError(f"the evaluation failed:\n{said[-2000:]}")


def _model_folder(checkpoint: Path, weights: Path, target: Path) -> None:
    """Make a checkpoint of other weights."""
    target.mkdir()
    copy_side_files(checkpoint, target)
    shutil.copy2(checkpoint / "config.json", target)
    (target / "model.safetensors").symlink_to(weights)
