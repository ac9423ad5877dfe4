"""The order in which derived defaults are filled in, and in which the checks run.

Derivations and checks are defined in the modules of the flags that they concern. Derivations write
to ``args``, and add a notice to ``args.notices`` for choices that a user could overlook. Checks
return a list of problems, each with what to change, and all problems are reported together.
"""

from __future__ import annotations

from collections.abc import Callable

from slime.config import (
    agent,
    algorithm,
    batch,
    cluster,
    data,
    engine,
    hooks,
    layout,
    lora,
    megatron,
    named_data,
    observability,
    passthrough,
    rollout,
    run,
    settings,
    trainer,
)
from slime.config.args import FLAGS, Args
from slime.config.flag import out_of_range
from slime.config.machine import Machine, this_machine
from slime.config.rules import Run, check_rules


def resolve_defaults(
    args: Args, *, asynchronous: bool = False, machine: Machine | None = None
) -> list[str]:
    """Fill in the derived defaults of flags that were not given, and return the problems.

    The order matters: later derivations read the values of earlier ones.
    """
    machine = machine or this_machine()
    problems: list[str] = []
    # The checks compare these paths with those of slime's own functions, so each has one spelling.
    for name, flag in FLAGS.items():
        if flag.kind == "hook":
            setattr(args, name, hooks.dotted(getattr(args, name)))
    # First the backends: the defaults of the model, of precision and of weight syncs depend on
    # them.
    run.derive_backends(args, machine)
    trainer.derive_model(args, machine)
    lora.derive_lora(args)
    # Then what replaces a part of the run: a debug mode has no trainer or no engines, and an
    # environment or an agent program selects functions of its own.
    observability.derive_debug_modes(args)
    agent.derive_environment(args)
    agent.derive_agent(args)
    # A data set by name becomes a file here, because the next derivation reads the first row of the
    # file.
    problems += named_data.derive_named_data(args)
    data.derive_data(args)
    # The estimator decides on a critic, and the placement has to know whether there is one.
    problems += batch.derive_batch(args)
    algorithm.derive_algorithm(args)
    algorithm.derive_corrections(args, asynchronous)
    cluster.derive_resources(args, machine, asynchronous)
    data.derive_evaluation(args)
    # The folders come last: their names contain the model and the estimator.
    run.derive_checkpoints(args)
    run.derive_run_folder(args)
    return problems


def check_ranges(args: Args) -> list[str]:
    """Check the ranges of derived values. Values of the command line and of files are checked when
    they are read.
    """
    problems = []
    for name, flag in FLAGS.items():
        value = getattr(args, name)
        problem = out_of_range(flag, value) if flag.status != "refused" else None
        if problem:
            problems.append(f"{flag.option} {value}: {problem}")
    return problems


CHECKS: tuple[Callable[[Args], list[str]], ...] = (
    trainer.check_checkpoint, trainer.check_reference, trainer.check_teacher, run.check_folders,
    observability.check_debug_files, observability.check_sinks, hooks.check_hooks, data.check_multimodal_keys,
    rollout.check_rotary, check_ranges, batch.check_split, engine.check_outer_caches, data.check_reward,
    agent.check_parsers, algorithm.check_estimator, algorithm.check_patterns, trainer.check_shape, trainer.check_media,
    layout.check_layout, megatron.check_fsdp, megatron.check_megatron, lora.check_lora, trainer.check_quantized_model,
    cluster.check_placement, passthrough.check, settings.check_roles,
)  # fmt: skip
"""What is not a row of :mod:`slime.config.rules`, because it reads files, or computes what to
say.
"""
DATA_CHECKS = (data.check_data_files, data.check_scored, data.check_eval_files)
"""Checks that need not read all data. Where ``slime.data`` reads the files, its own checks replace
these.
"""


def validate(
    args: Args,
    *,
    asynchronous: bool = False,
    machine: Machine | None = None,
    data_is_checked: bool = False,
) -> list[str]:
    """Return the problems of resolved arguments. Notices are added to ``args.notices``.

    Args:
        data_is_checked: Whether ``slime.data`` checks the data files, so that a missing file is not
            reported twice.
    """
    machine = machine or this_machine()
    problems = [
        problem
        for check in (*CHECKS, *(() if data_is_checked else DATA_CHECKS))
        for problem in check(args)
    ]
    # Rules are checked even if other checks fail, so that one call tells everything.
    problems += check_rules(Run(args, asynchronous, machine))
    if asynchronous:
        problems += [*rollout.check_staleness(args), *rollout.check_old_actor(args)]
    return problems + cluster.check_machine(args, machine)
