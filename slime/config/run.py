"""Flags of the run itself: backends, output folder, deadlines, and snapshots; and the checkpoint
that a run starts from. Imports no torch.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from slime.config.algorithm import estimator_label
from slime.config.files import export_template
from slime.config.flag import Section, flag, path_flag
from slime.config.hf_config import looks_like_hub_id, megatron_folder
from slime.config.machine import Machine, installed
from slime.registry import find, parts

if TYPE_CHECKING:
    from slime.config.args import Args


def folder_name(name: str) -> None:
    """Refuse a run's name that is not that of a folder of its own in ``--output-dir``."""
    if name in ("", ".", "..", "latest") or "/" in name:
        raise ValueError(
            f"{name!r} is not the name of a folder: use one without /, and not latest, a link to the "
            "newest run; --output-dir is the folder of the runs"
        )


@dataclass
class RunConfig(Section):
    _title = "run"

    train_backend: str = flag(kind_of_part="backend")
    """Training backend. Default: megatron on CUDA where megatron-core is installed, otherwise
    fsdp
    """
    rollout_backend: str = flag(kind_of_part="engine")
    """Inference backend; embedded is slime's own server. Default: sglang on CUDA where SGLang is
    installed, otherwise embedded"""
    deterministic: bool = flag()
    """Make two runs with the same seed identical: bit for bit with FSDP and the embedded engine on
    the CPU, nearly with SGLang or on GPUs. Default: on with the embedded engine on a CPU machine,
    unless --partial-rollout is given"""
    seed: int = 1234
    """Random seed of the trainer: weight initialisation, dropout and every other random choice"""
    output_dir: str = flag("outputs", kind="path")
    """Parent folder of the runs, each of which has its own folder"""
    run_name: str = flag(valid=folder_name)
    """Name of the run's folder. Default: the resumed run's, otherwise model, estimator and time"""
    dry_run: bool = False
    """Print what the run would do and end: settings, numbers of samples and steps, memory, the
    first prompt, and the reward of its label's own answer"""
    override: str | None = path_flag()
    """YAML file of flag names and values that is applied after all other settings, to scale a
    recipe to a machine; the changes are printed"""
    custom_config_path: str | None = path_flag()
    """YAML file whose keys become attributes of args before the settings are checked, for the
    user's own hooks
    """
    start_timeout: float = flag(900.0, above=0)
    """Deadline in seconds for the start of an engine or of the trainer"""
    status_timeout: float = flag(120.0, low=0)
    """Seconds without an answer after which the rollout manager, a training rank or a stopped
    driver counts as lost; 0 disables this"""
    phase_timeout: float = flag(3600.0, above=0)
    """Deadline in seconds for generating a rollout, training on it, or a weight sync"""


def derive_backends(flags: Section, machine: Machine, inline: bool) -> None:
    """Fill in the backends, and the device of the embedded engine."""
    flags.fill(
        # ranks of Megatron are processes
        train_backend="megatron"
        if machine.cuda and not inline and installed("megatron.core")
        else "fsdp",
        rollout_backend="sglang" if machine.cuda and installed("sglang") else "embedded",
        embedded_device="cuda" if machine.cuda else "cpu",
    )


def derive_run_folder(
    args: Args, now: Callable[[], str] = lambda: time.strftime("%Y%m%d-%H%M%S")
) -> None:
    if args.run_name is None:
        resumed = (
            None if args.load is None or args.finetune else _resumed_run(args.load, args.output_dir)
        )
        model = (
            re.sub(r"[^\w.-]+", "-", Path(args.hf_checkpoint).name) if args.hf_checkpoint else "run"
        )
        kind = (
            estimator_label(args.advantage_estimator)
            if args.loss_type == "policy_loss"
            else args.loss_type
        )
        args.run_name = resumed or f"{model}-{kind}-{now()}"
    if args.save_interval and args.save is None:
        args.save = str(Path(args.output_dir) / args.run_name / "checkpoints")
        args.notices.append(f"--save is not given: snapshots are written to {args.save}")


def _resumed_run(load: str, output_dir: str) -> str | None:
    """Return the name of the run whose ``outputs/<run>/checkpoints`` is loaded, so that it
    continues in its folder.
    """
    # Curves of a resumed run continue in the same folder, which the user need not name again.
    folder = Path(load).resolve()
    if (
        folder.name == "checkpoints"
        and folder.parent.parent == Path(output_dir).resolve()
        and folder.is_dir()
    ):
        return folder.parent.name
    return None


@dataclass
class CheckpointConfig(Section):
    _title = "checkpoints"

    load: str | None = path_flag()
    """Folder to start from: a --save folder, from which the run resumes, or a Hugging Face folder
    with initial weights"""
    save: str | None = path_flag()
    """Folder for snapshots of the run. Default: outputs/<run>/checkpoints if --save-interval is
    given, otherwise no snapshots"""
    save_interval: int | None = flag(low=1)
    """Number of rollouts between snapshots; the end of the run adds one. Default: no snapshots"""
    save_keep_last: int | None = flag(low=1)
    """Number of snapshots to keep. Default: all, or 1 with --save-retain-interval"""
    save_retain_interval: int | None = flag(low=1)
    """Keep one snapshot every N rollouts of those that --save-keep-last would delete"""
    save_hf: str | None = path_flag(export_template)
    """Folder for an export of the weights in Hugging Face format with each snapshot; {rollout_id}
    in the path is replaced by the rollout's number"""
    save_hf_dtype: Literal["float32", "bfloat16", "source"] | None = None
    """Dtype of the weights in --save-hf. source: as in --hf-checkpoint, also quantized (FP8, INT4
    or INT8 of compressed-tensors, MXFP4). Default: the dtype in which they are trained"""
    critic_load: str | None = path_flag()
    """Where a new run's critic gets its weights: a Hugging Face folder with the tokens of
    --hf-checkpoint, or the newest snapshot in a folder of --save or --critic-save. Default:
    --hf-checkpoint"""
    critic_save: str | None = path_flag()
    """Folder that keeps the critic of each snapshot, for --critic-load of other runs; on the disk
    of --save, a link to the same files"""
    ref_load: str = flag(kind="path", same_as="hf_checkpoint")
    """Reference model for the KL divergence. Default: --hf-checkpoint"""
    ref_ckpt_step: int | None = flag(low=0)
    """Iteration to read from --ref-load, a folder of Megatron-LM. Default: that of its tracker
    file
    """
    ckpt_step: int | None = flag(low=0)
    """Iteration of the snapshot to load from --load. Default: the latest"""
    no_save_optim: bool = False
    """Leave the optimizer state out of snapshots"""
    no_load_optim: bool = False
    """Do not load the optimizer and learning-rate schedule from the snapshot; start both from the
    beginning
    """
    no_load_rng: bool = False
    """Do not load the states of the random number generators from the snapshot"""
    finetune: bool = False
    """Load only the weights from --load and start at rollout 0"""
    async_save: bool = False
    """Write snapshots in the background. Each rank then keeps a copy of its training state in CPU
    memory
    """
    ckpt_format: Literal["torch", "torch_dist"] = "torch_dist"
    """Snapshot format of the Megatron backend: torch_dist can be loaded with another parallel
    layout, torch (one file per rank) only with the same one"""


def check_folders(saved: CheckpointConfig) -> list[str]:
    """Check what --load names."""
    if saved.load is None or saved.load == saved.save or Path(saved.load).expanduser().exists():
        return []
    if looks_like_hub_id(saved.load):
        return []
    return [
        f"--load {saved.load}: no such folder (it may be missing only if --save names the same "
        "folder)"
    ]


def other_folder(path: str | None, step: int | None = None) -> Path | None:
    """Return the folder of a checkpoint that another program wrote and whose weights can be read;
    None if there is none.

    Args:
        path: The folder that a flag names.
        step: The iteration to select. Default: the newest one.
    """
    readers = () if path is None else parts("checkpoint folder")
    found = (find("checkpoint folder", name)(path, step) for name in readers)
    return next(filter(None, found), None)


def weights_path(path: str | None, step: int | None = None) -> str | None:
    """Return the folder of an iteration (:func:`other_folder`), or ``path`` if it is
    something else.
    """
    found = other_folder(path, step)
    return path if found is None else str(found)


@dataclass(frozen=True)
class InitialWeights:
    """The checkpoints that the flags name. Of a folder that Megatron-LM wrote, it is the folder of
    one iteration.
    """

    load: str | None
    ref_load: str | None
    hf_checkpoint: str

    @classmethod
    def of(cls, flags: CheckpointConfig, hf_checkpoint: str | None) -> InitialWeights:
        assert hf_checkpoint is not None, "the checks of the flags require it"
        return cls(
            weights_path(flags.load, flags.ckpt_step),
            weights_path(flags.ref_load, flags.ref_ckpt_step),
            hf_checkpoint,
        )

    def hf_folder(self) -> str:
        """Return the Hugging Face checkpoint that has the configuration of the initial weights."""
        return (
            self.load
            if self.load and (Path(self.load) / "config.json").is_file()
            else self.hf_checkpoint
        )

    def path(self, megatron: bool) -> str:
        """Return the checkpoint of the initial weights.

        It is ``--load`` if it has weights, otherwise ``--ref-load`` if it is a Megatron checkpoint,
        otherwise ``--hf-checkpoint``. A snapshot is loaded later.

        Args:
            megatron: Whether the backend is Megatron, which also reads slime's own Megatron
                checkpoints.
        """
        # FSDP cannot read the tensors of the Megatron backend.
        names = ("config.json", "trainer.json") if megatron else ("config.json",)
        if self.load and (
            other_folder(self.load) or any((Path(self.load) / name).is_file() for name in names)
        ):
            return self.load
        if self.ref_load and (
            other_folder(self.ref_load) or (megatron and megatron_folder(self.ref_load))
        ):
            return self.ref_load
        return self.hf_checkpoint
