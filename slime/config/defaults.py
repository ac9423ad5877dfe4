"""What a flag is when it was not given: derived from other flags, the machine and the first row of the data.

The derivations stand beside the flags that they concern; their order stands here. They write to ``args``, and explain
choices that a user could miss in ``args.notices``.
"""

from __future__ import annotations

from typing import Any

from slime.config.agent import derive_agent
from slime.config.args import Args
from slime.config.batch import derive_batch
from slime.config.checkpoint import derive_checkpoints
from slime.config.cluster import derive_resources
from slime.config.data import derive_data
from slime.config.estimator import algorithm_class, loading_problem
from slime.config.evaluation import derive_evaluation
from slime.config.machine import Machine, this_machine
from slime.config.model import derive_model
from slime.config.observability import derive_debug_modes
from slime.config.rollout import staleness_bound
from slime.config.run import derive_backends, derive_run_folder


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
    _algorithm(args, asynchronous)
    derive_resources(args, machine, asynchronous)
    derive_evaluation(args)
    derive_checkpoints(args)
    derive_run_folder(args)
    return problems


def default_args(**values: Any) -> Args:
    """Resolved but unchecked Args, for tests and tools: ``default_args(rollout_batch_size=4)``.

    Pass-through flags come as ``sglang={"mem_fraction_static": 0.8}``.

    Raises:
        TypeError: a name that is no field of Args.
    """
    args = Args()
    for name, value in values.items():
        if name not in vars(args):
            raise TypeError(f"args has no {name!r}")
        setattr(args, name, value)
    args.explicit = frozenset(values)
    resolve_defaults(args)
    return args


def _algorithm(args: Args, asynchronous: bool) -> None:
    if args.eps_clip_high is None:
        args.eps_clip_high = args.eps_clip
    if args.n_samples_per_prompt == 1:
        args.grpo_std_normalization = False
    # A class that cannot be loaded is reported by the checks, together with all other problems.
    loads = loading_problem(args.advantage_estimator) is None
    args.use_critic = loads and algorithm_class(args.advantage_estimator).needs_critic
    if args.kl_loss_type is None:
        args.kl_loss_type = "k1" if args.kl_coef != 0 else "low_var_kl"
    if args.use_rollout_routing_replay:
        args.use_routing_replay = True
    if args.use_tis is None:
        _correct_by_default(args, asynchronous)


def _correct_by_default(args: Args, asynchronous: bool) -> None:
    """Where samples are older than the weights they train, the loss is weighed, unless the user chose otherwise."""
    chosen = args.use_rollout_logprobs or args.custom_tis_function_path or args.get_mismatch_metrics
    bound = staleness_bound(args.async_buffer_size, args.update_weights_interval, args.max_weight_staleness)
    args.use_tis = asynchronous and bound > 0 and args.loss_type == "policy_loss" and not chosen
    if args.use_tis:
        args.notices.append(
            f"--use-tis is on: tokens may be {bound} step(s) older than the weights that they train (off: --no-use-tis)"
        )
