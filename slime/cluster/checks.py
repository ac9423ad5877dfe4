"""Checks of the command line before any process starts. All problems are reported together."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from slime import registry
from slime.config.args import FLAGS, Args
from slime.config.hf_config import (
    is_hf_folder,
    looks_like_hub_id,
    megatron_folder,
    model_config,
    read_config,
)
from slime.config.rules import Run
from slime.config.run import other_folder
from slime.models.shards import ModelError, quantization_of, require_hub


def parse_and_check(argv: Sequence[str] | None = None, asynchronous: bool = False) -> Args:
    """Parse the flags and check files, rows and labels; prints all problems and exits with 2 if
    there are any. With ``--dry-run``, prints what the run would do and exits with 0.

    If the flags come from the command line (``argv`` is None) and contain ``--max-restarts``, this
    process becomes the supervisor of the run. Then the call returns in the supervisor's child,
    which does not repeat the checks.
    """
    from slime.cluster.stop_signals import REPORTS
    from slime.config.parser import ConfigError, load_args, parse_args

    words = list(argv) if argv is not None else None
    if words is None and REPORTS.attach():
        # A file has vanished since; parse_args reports that below.
        with contextlib.suppress(ConfigError):
            return load_args(asynchronous=asynchronous, settings=REPORTS.settings)
    args = parse_args(
        words,
        asynchronous=asynchronous,
        extra_checks=[check_all],
        settings=REPORTS.settings,
    )
    if args.dry_run:
        try:
            dry_run(args, asynchronous)
        except ConfigError as error:
            print(f"slime: {error}", file=sys.stderr)
            raise SystemExit(2) from error
        raise SystemExit(0)
    # such as that the run will not fit on the GPUs of this machine
    for name in registry.parts("warning"):
        for warning in registry.find("warning", name)(args, asynchronous):
            print(f"slime: warning: {name}: {warning}", file=sys.stderr)
    if words is None and args.max_restarts and not REPORTS.attached:
        registry.find("recovery", "restarts").supervise()
    return args


def dry_run(args: Args, asynchronous: bool = False) -> None:
    """Print the reports of plug-ins: what a run with these arguments, which have been checked,
    would do.

    Raises:
        ConfigError: A row that was not checked before, as in the middle of a file that is streamed,
            cannot be used.
    """
    for name in registry.parts("report"):
        for line in registry.find("report", name)(args, asynchronous):
            print(line)
    print("\ndry run: no process was started and no file was written")


def check_all(run: Run) -> list[str]:
    """The checks of files, rows, labels, checkpoints and folders, which come after those of the
    flags themselves.
    """
    args = run.args
    # imported only when it runs, so that --help needs no numpy
    from slime.data.validate import check_data
    from slime.rollout.rm_hub.dispatch import check_rewards
    from slime.rollout.rm_hub.reward import check_label

    checks = (
        partial(check_data, check_label=check_label),
        check_rewards,
        *registry.called_for("check", args),
        check_schedules,
        check_checkpoints,
    )
    # Without its model, the other checks of a run would wait for the hub again.
    if problems := check_hub(_named_checkpoints(args)):
        return problems
    # A check may go on in another process until its problems are read.
    started = [*(check(args) for check in checks), check_snapshots(run)]
    return [problem for problems in started for problem in problems]


def check_hub(named: dict[str, str]) -> list[str]:
    """Check that the hub gives each model that is not on this machine."""
    problems = []
    for option, path in named.items():
        if looks_like_hub_id(path) and not Path(path).expanduser().exists():
            try:
                require_hub(path)
            except ModelError as error:
                problems.append(f"{option}: {error}")
    return problems


def check_schedules(args: Args) -> list[str]:
    """Problems of the learning-rate schedules of all roles; none as long as the length of the run
    is unknown.
    """
    from slime.backends.lr_schedule import LrSchedule
    from slime.config.settings import role_args

    if args.num_rollout is None or args.debug_rollout_only:
        return []
    problems = []
    for role in ("actor", "critic") if args.use_critic else ("actor",):
        try:
            LrSchedule.from_args(role_args(args, role), role)
        except ValueError as error:
            problems.append(f"{role}: {error}")
    return problems


def check_checkpoints(args: Args) -> list[str]:
    """Check that the headers of each Hugging Face checkpoint fit the model that its config.json
    describes, and that no weights of a quantized one would have to be updated in SGLang.
    """
    from slime.models.checked import check_checkpoint_once, require_tied

    problems = []
    megatron = args.train_backend == "megatron"
    sglang = args.rollout_backend == "sglang"
    by_transformers = not megatron or args.rollout_backend == "embedded"
    for option, path in _on_this_machine(_named_checkpoints(args)).items():
        try:
            notices = check_checkpoint_once(path, args.trust_remote_code, by_transformers)
            if megatron:
                require_tied(notices, "Megatron")
            if sglang:
                require_tied(notices, "SGLang")
            args.notices.extend(f"{path} {notice}" for notice in notices)
        except ModelError as error:
            problems.append(f"{option}: {error}")
    quantization = quantization_of(model_config(args.hf_checkpoint))
    updates = not (args.debug_train_only or args.debug_rollout_only)
    if quantization is not None and sglang and updates:
        problems.append(
            f"--hf-checkpoint {args.hf_checkpoint} is quantized "
            f"({quantization.get('quant_method')}): SGLang would keep its quantized layers, and the "
            "trainer's plain weights do not fit them. Convert it to a plain checkpoint with "
            "tools/dequantize_hf.py and pass that instead"
        )
    return problems


def _named_checkpoints(args: Args) -> dict[str, str]:
    named = {
        "--hf-checkpoint": args.hf_checkpoint,
        "--load": is_hf_folder(args.load) and args.load,
        "--critic-load": args.use_critic and is_hf_folder(args.critic_load) and args.critic_load,
        "--ref-load": (args.use_kl_loss or args.kl_coef != 0) and args.ref_load,
        "--opd-teacher-load": args.opd_teacher_load,
    }
    return {option: str(path) for option, path in named.items() if path}


def _on_this_machine(named: dict[str, str]) -> dict[str, str]:
    """Return the checkpoints that are on this machine; one that several flags name only once."""
    found: dict[str, str] = {}
    for option, path in named.items():
        if path in found.values() or megatron_folder(path):
            continue
        if is_hf_folder(path) or read_config(path) is not None:
            found[option] = path
    return found


def check_snapshots(run: Run) -> list[str]:
    """Refuse ``--load`` and ``--save`` folders with checkpoints of another program or backend, and
    a snapshot whose rollouts could not be scored (:func:`check_same_old_actor`)."""
    from slime.checkpoint.files import hostile_file
    from slime.checkpoint.manifest import DECIDES_OLD_ACTOR, ResumeError, check_same_old_actor
    from slime.checkpoint.snapshot import SnapshotError, kind, refuse_foreign
    from slime.cluster.folders import snapshot_of
    from slime.config.lora import adapter_file

    args = run.args
    load = args.load
    problems = []
    try:
        if args.save:
            refuse_foreign(Path(args.save).expanduser())
    except SnapshotError as error:
        problems.append(str(error))
    try:
        if load:
            folder = Path(load).expanduser()
            hooks = [getattr(args, name) for name, flag in FLAGS.items() if flag.kind == "hook"]
            own_classes = any(path and not str(path).startswith("slime.") for path in hooks)
            snapshot = snapshot_of(load, args.ckpt_step, digests=False)
            place = folder if snapshot is None else snapshot.path
            if snapshot is not None and (hostile := hostile_file(place, own_classes)):
                problems.append(f"--load {load}: {hostile}")
            problems += _wrong_backend(load, place, args.train_backend)
            if snapshot is not None and not args.finetune:
                check_same_old_actor(
                    snapshot.manifest,
                    {n: getattr(args, n) for n in DECIDES_OLD_ACTOR},
                    run.asynchronous,
                )
            if adapter_file(load) is not None:
                # imports torch, which the driver does not need otherwise
                from slime.models import peft_files

                peft_files.read_config(folder)
            elif (
                load != args.save
                and kind(folder) == "empty"
                and not megatron_folder(load)
                and not other_folder(load, args.ckpt_step)
            ):
                problems += _nothing_to_load(load, folder)
        if args.use_critic and args.critic_load:
            problems += _check_critic(args.critic_load, args.hf_checkpoint)
    except (SnapshotError, ModelError, ResumeError) as error:
        problems.append(str(error))
    return problems


def _check_critic(load: str, checkpoint: str | None) -> list[str]:
    """Check that ``--critic-load`` has a critic, or a model that knows the same tokens."""
    from slime.checkpoint.files import hostile_file
    from slime.cluster.folders import snapshot_of

    if is_hf_folder(load):
        sizes = [model_config(name).get("vocab_size") for name in (load, checkpoint)]
        return [] if sizes[0] == sizes[1] else [
            f"--critic-load {load} has {sizes[0]} tokens, but --hf-checkpoint {sizes[1]}: the critic "
            "reads what the actor writes, so both need the same tokenizer"
        ]  # fmt: skip
    snapshot = snapshot_of(load, digests=False)
    if snapshot is None or not (snapshot.path / "critic").is_dir():
        return [
            f"--critic-load {load}: neither a Hugging Face folder (config.json) nor a snapshot with "
            "a critic; pass the --save or --critic-save folder of a run with --advantage-estimator "
            "ppo"
        ]
    hostile = hostile_file(snapshot.path, False)
    return [f"--critic-load {load}: {hostile}"] if hostile else []


def _nothing_to_load(named: str, folder: Path) -> list[str]:
    """Refuse a folder that is not empty but holds nothing to load: the run would silently start
    from scratch.
    """
    entries = folder.iterdir() if folder.is_dir() else ()
    there = sorted(entry.name for entry in entries if not entry.name.startswith("."))
    shown = there if len(there) < 4 else [*there[:3], "..."]
    return [
        f"--load {named}: neither snapshots (iter_*; in outputs/RUN, these are in checkpoints/), nor "
        "a Hugging Face folder (config.json), nor Megatron weights (torch_dist), nor an adapter "
        f"(adapter_config.json) were found there, only {', '.join(shown)}"
    ] if there else []  # fmt: skip


def _wrong_backend(named: str, folder: Path, backend: str) -> list[str]:
    """Refuse a snapshot of the other training backend."""
    saved_with = backend
    if megatron_folder(str(folder)) is not None:
        saved_with = "megatron"
    elif (folder / "actor" / "dcp").is_dir():
        saved_with = "fsdp"
    if saved_with == backend:
        return []
    return [
        f"--load {named} was saved with --train-backend {saved_with}, but this run has {backend}: use "
        "that backend, or convert the snapshot to a Hugging Face folder (tools/convert_to_hf.py) "
        "and load the folder"
    ]
