"""The order in which derived defaults are filled in, and in which the checks run.

The derivations and the checks stand beside the flags that they concern. Derivations write to ``args`` and explain
choices that a user could miss in ``args.notices``. Checks return what is wrong and what to change; all problems are
reported together.
"""

from __future__ import annotations

from slime.config import passthrough
from slime.config.agent import check_constrained_decoding, check_parsers, derive_agent
from slime.config.algorithm import check_estimator, check_losses, derive_algorithm
from slime.config.args import FLAGS, Args
from slime.config.batch import check_batch, derive_batch
from slime.config.cluster import check_machine, check_placement, check_routing_replay, derive_resources
from slime.config.corrections import check_distillation, check_kl, check_off_policy, check_opsm, derive_corrections
from slime.config.data import (
    check_data_files,
    check_eval_files,
    check_multimodal_keys,
    check_reward,
    check_scored,
    derive_data,
    derive_evaluation,
)
from slime.config.engine import check_draft
from slime.config.flag import out_of_range
from slime.config.hooks import check_hooks
from slime.config.machine import Machine, this_machine
from slime.config.megatron_flags import check_fsdp, check_megatron
from slime.config.observability import check_debug_files, check_sinks, derive_debug_modes
from slime.config.rollout import check_loop, check_rollout
from slime.config.run import check_load, derive_backends, derive_checkpoints, derive_run_folder
from slime.config.settings import check_roles
from slime.config.trainer import (
    check_checkpoint,
    check_media,
    check_reference,
    check_schedule,
    check_shape,
    check_teacher,
    derive_model,
)
from slime.config.weight_sync import check_disk_sync


def resolve_defaults(args: Args, *, asynchronous: bool = False, machine: Machine | None = None) -> list[str]:
    """Fill in every flag that has a derived default and was not given. Returns problems.

    The order matters: later derivations read what earlier ones filled in.
    """
    machine = machine or this_machine()
    problems: list[str] = []
    derive_backends(args, machine)
    derive_model(args, machine)
    derive_debug_modes(args)
    problems += derive_agent(args)
    derive_data(args)
    problems += derive_batch(args)
    derive_algorithm(args)
    derive_corrections(args, asynchronous)
    derive_resources(args, machine, asynchronous)
    derive_evaluation(args)
    derive_checkpoints(args)
    derive_run_folder(args)
    return problems


def check_ranges(args: Args) -> list[str]:
    """Ranges of values that were derived; those of the command line and of files are checked as they are read."""
    problems = []
    for name, flag in FLAGS.items():
        value = getattr(args, name)
        problem = out_of_range(flag, value) if flag.status != "refused" else None
        if problem:
            problems.append(f"{flag.option} {value}: {problem}")
    if args.rollout_temperature == 0:
        hint = "greedy sampling cannot explore; evaluate greedily with --eval-temperature 0"
        problems.append(f"--rollout-temperature 0: must be above 0 ({hint})")
    return problems


FILE_RULES = (
    *(check_checkpoint, check_reference, check_teacher, check_load, check_disk_sync, check_debug_files, check_sinks),
    *(check_hooks, check_multimodal_keys),
)
DATA_RULES = (check_data_files, check_scored, check_eval_files)
"""What can be said of the data without reading it; the data room's own check says more."""
ROLLOUT_RULES = (check_ranges, check_batch, check_rollout, check_draft, check_reward)
AGENT_RULES = (check_parsers, check_constrained_decoding)
ALGORITHM_RULES = (check_kl, check_estimator, check_losses, check_off_policy, check_distillation, check_schedule)
MODEL_RULES = (check_shape, check_media, check_fsdp, check_megatron)


def validate(
    args: Args, *, asynchronous: bool = False, machine: Machine | None = None, data_is_checked: bool = False
) -> list[str]:
    """Problems of resolved args, in the order of the rooms. Notices go to ``args.notices``.

    Args:
        data_is_checked: the data room reads the files itself, so their absence is not told twice.
    """
    problems: list[str] = []
    data_rules = () if data_is_checked else DATA_RULES
    for rule in (*FILE_RULES, *data_rules, *ROLLOUT_RULES, *AGENT_RULES, *ALGORITHM_RULES, *MODEL_RULES):
        problems += rule(args)
    problems += check_loop(args, asynchronous)
    problems += check_opsm(args, asynchronous)
    problems += check_placement(args)
    problems += check_machine(args, machine or this_machine())
    problems += check_routing_replay(args, machine or this_machine())
    problems += passthrough.check(args)
    problems += check_roles(args)
    return problems
