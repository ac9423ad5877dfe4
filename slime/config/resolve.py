"""The order in which derived defaults are filled in, and in which the checks run.

Derivations and checks are defined in the modules of the flags that they concern. Derivations write
to ``args``, and add a notice to ``args.notices`` for choices that a user could overlook. Checks
return a list of problems, each with what to change, and all problems are reported together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from slime.config import (
    algorithm,
    cluster,
    data,
    engine,
    hooks,
    layout,
    lora,
    observability,
    passthrough,
    rollout,
    settings,
    trainer,
)
from slime.config import run as start
from slime.config.args import FLAGS
from slime.config.flag import out_of_range
from slime.config.layout import ParallelLayout
from slime.config.machine import installed
from slime.config.rules import Run, check_rules, set_defaults
from slime.registry import find, parts


def resolve_defaults(run: Run) -> list[str]:
    """Fill in the derived defaults of flags that were not given, and return the problems.

    The order matters: later derivations read the values of earlier ones.
    """
    args = run.args
    problems: list[str] = []
    # The checks compare these paths with those of slime's own functions, so each has one spelling.
    for name, flag in FLAGS.items():
        if flag.kind == "hook":
            setattr(args, name, hooks.dotted(getattr(args, name)))
    # First the backends: the defaults of the model, of precision and of weight syncs depend on
    # them.
    start.derive_backends(args, run.machine, args.inline)
    trainer.derive_model(run)
    embedded = args.rollout_backend == "embedded" and not args.rollout_external_engine_addrs
    lora.derive_lora(args.load, embedded, lora=args, sync=args)
    # Then what replaces a part of the run: a debug mode has no trainer or no engines, and an
    # environment or an agent program selects functions of its own.
    observability.derive_debug_modes(args)
    if (
        args.load_forge_rollout_data
        and args.rollout_function_path == rollout.DEFAULT_ROLLOUT_FUNCTION
    ):
        args.rollout_function_path = rollout.FORGE_FUNCTION
    for name in parts("resolver"):
        problems += find("resolver", name)(args)
    # A data set by name becomes a file here, because the next derivation reads the first row of the
    # file.
    generates = bool(args.custom_generate_function_path)
    problems += data.derive_named_data(generates, args.notices, data=args, reward=args)
    data.derive_data(args)
    # The estimator decides on a critic, and the placement has to know whether there is one.
    problems += layout.derive_batch(args)
    args.use_critic = algorithm.needs_critic(args.advantage_estimator)
    args.fill(kl_loss_type="k1" if args.kl_coef else "low_var_kl")
    # The standard deviation of one reward is 0.
    if args.n_samples_per_prompt == 1:
        args.grpo_std_normalization = False
    cluster.derive_resources(run)
    # Then what follows from a single flag, or from conditions that are rows.
    for name, flag in FLAGS.items():
        if flag.same_as:
            args.fill(**{name: getattr(args, flag.same_as)})
    set_defaults(run)
    args.notices += cluster.derive_critic(args, args.use_critic and not args.critic_gpus)
    args.notices += data.derive_evaluation(args, args.rollout_function_path)
    # The folders come last: their names contain the model and the estimator.
    if args.save_retain_interval:
        args.fill(save_keep_last=1)
    start.derive_run_folder(args)
    return problems


def check_ranges(values: Mapping[str, Any]) -> list[str]:
    """Check the ranges of derived values. Values of the command line and of files are checked when
    they are read.
    """
    return [
        f"{flag.option} {value}: {problem}"
        for name, flag in FLAGS.items()
        if flag.status != "refused"
        for value in [values[name]]
        if (problem := out_of_range(flag, value))
    ]


def missing_packages(values: Mapping[str, Any]) -> list[str]:
    """Report parts that flags name and whose package is not installed on this machine."""
    problems = []
    for name, flag in FLAGS.items():
        kind = flag.kind_of_part
        # External engines do not need their package here.
        if kind is None or (kind == "engine" and values["rollout_external_engine_addrs"]):
            continue
        value = values[name]
        for one in value if isinstance(value, list) else [value]:
            part = parts(kind).get(one)
            if part and part.package and not installed(part.package[0]):
                problems.append(
                    f"{flag.option} {one}: it is not installed; run pip install {part.package[1]}"
                )
    return problems


def _checks(run: Run) -> Iterator[list[str]]:
    """What is not a row of :mod:`slime.config.rules`, because it reads files, or computes what to
    say. Each check gets the sections and values that it reads.
    """
    args = run.args
    trains = not args.debug_rollout_only
    # The checkpoints, and the files that flags name.
    yield trainer.check_checkpoint(args)
    yield trainer.check_reference(args)
    yield trainer.check_teacher(args.opd_teacher_load, args.train_backend)
    yield start.check_folders(args)
    yield hooks.check_hooks(FLAGS, args)
    # What a rollout generates.
    if trains and args.loss_type != "sft_loss":
        yield rollout.check_rotary(args, rollout.served_context(args), args.hf_checkpoint)
    yield check_ranges(vars(args))
    yield missing_packages(vars(args))
    yield data.check_reward(args)
    # What is trained, and how it is divided over ranks.
    divided = ParallelLayout.from_args(args)
    if trains:
        yield layout.check_split(divided, batch=args, rollout=args)
    yield algorithm.check_estimator(args)
    if args.multimodal_keys:
        yield trainer.check_media(args.hf_checkpoint)
    yield divided.problems()
    if args.train_backend not in parts("layout"):
        yield layout.check_shard_size(
            args.fsdp_shard_size, args.world_size, args.fsdp_expert_parallel_size
        )
    yield lora.check_lora(args)
    # The processes and what is passed on to them.
    yield engine.check_server_groups(args)
    problems, notices = passthrough.check(vars(args), args.rollout_backend)
    args.notices += notices
    yield problems
    yield settings.check_roles(args)
    yield cluster.check_machine(run)


def validate(run: Run) -> list[str]:
    """Return the problems of resolved arguments. Notices are added to ``run.args.notices``.

    What the data files hold is checked by :mod:`slime.data.validate`.
    """
    # Rules are checked even if other checks fail, so that one call tells everything.
    return [problem for check in _checks(run) for problem in check] + check_rules(run)
