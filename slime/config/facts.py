"""What rules ask about a run besides the values of single flags, by the name that messages give it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from slime.algorithms.algorithm import Algorithm
from slime.algorithms.dr_grpo import DrGrpo
from slime.algorithms.grpo import Grpo
from slime.config.algorithm import algorithm_class, loading_problem
from slime.config.hf_config import is_hf_folder, read_config
from slime.config.lora import has_experts
from slime.config.machine import Machine
from slime.config.rollout import OWN_FUNCTIONS, is_fully_async, may_use_workers, old_actor_lag, trains_late

if TYPE_CHECKING:
    from slime.config.args import Args


class Run(NamedTuple):
    """What the facts are about."""

    args: Args
    asynchronous: bool
    machine: Machine

    @property
    def algorithm(self) -> type[Algorithm]:
        """The estimator's class; if it cannot be loaded, which is a problem of its own, the base class."""
        name = self.args.advantage_estimator
        return Algorithm if loading_problem(name) else algorithm_class(name)

    @property
    def config(self) -> dict[str, Any]:
        """The model's config.json; empty if it is not on this machine."""
        return (read_config(self.args.hf_checkpoint) if self.args.hf_checkpoint else None) or {}

    @property
    def ranks(self) -> int:
        return self.args.actor_num_nodes * (self.args.actor_num_gpus_per_node or 1)


def _returns_groups(run: Run) -> object:
    """Whether unfinished groups can be left when a rollout has all that it needs."""
    args = run.args
    fetches_more = args.over_sampling_batch_size > args.rollout_batch_size
    aborts = fetches_more or args.dynamic_sampling_filter_path or run.asynchronous
    return "rollout_function_path" in args.explicit or (aborts and not args.deterministic)


def _evaluates(run: Run) -> object:
    args = run.args
    own = args.eval_function_path not in (args.rollout_function_path, *OWN_FUNCTIONS)  # it may need no data
    return own or args.eval_prompt_data or args.eval_config


def _serves_on_cpu(run: Run) -> bool:
    args = run.args
    has_gpu = args.sglang.get("device") != "cpu" and (run.machine.cuda or run.machine.in_cluster)
    return args.rollout_backend == "sglang" and not args.rollout_external_engine_addrs and not has_gpu


def _decay_changes(run: Run) -> bool:
    both = [run.args.megatron.get(f"{name}_weight_decay") for name in ("start", "end")]
    start, end = (run.args.weight_decay if value is None else value for value in both)
    return bool(start != end)


FACTS: dict[str, Callable[[Run], object]] = {
    "train_async.py": lambda run: run.asynchronous,
    "the fully asynchronous rollout": lambda run: is_fully_async(run.args),
    "a rollout function of slime": lambda run: may_use_workers(run.args),
    "groups that train in a later rollout": lambda run: trains_late(run.args),
    "groups that are aborted": _returns_groups,
    "an old actor that is one update behind": lambda run: old_actor_lag(run.args) == 1,
    "evaluation data": _evaluates,
    "use_rs of --custom-config-path": lambda run: vars(run.args).get("use_rs"),
    "a critic": lambda run: run.args.use_critic,
    "an estimator that compares the samples of a group": lambda run: run.algorithm.needs_group,
    "an estimator that discounts": lambda run: run.algorithm.discounts,
    "an estimator with a KL divergence in its reward": lambda run: run.algorithm.uses_kl_in_reward,
    "an estimator with a dual clip": lambda run: run.algorithm.policy_loss is Algorithm.policy_loss,
    "rewards that are divided by the standard deviation": lambda run: (
        run.algorithm.group_baseline is Grpo.group_baseline and run.args.rewards_normalization
    ),
    "an estimator of the user": lambda run: "row" not in vars(run.algorithm),  # only built-in classes have a row
    "Dr. GRPO": lambda run: issubclass(run.algorithm, DrGrpo),
    "padded batches": lambda run: run.args.attn_implementation not in (None, "varlen"),
    "several training ranks": lambda run: run.ranks > 1,
    "several replicas": lambda run: run.args.fsdp_shard_size not in (None, run.ranks),
    "packs of a multiple of 16 tokens": lambda run: run.args.data_pad_size_multiplier % 16 == 0,
    "a weight decay that changes": _decay_changes,
    "a GPU": lambda run: run.machine.cuda or run.machine.in_cluster,
    "a GPU of this machine": lambda run: run.machine.cuda,
    "SGLang on a CPU": _serves_on_cpu,
    "a snapshot in --load": lambda run: run.args.load and not is_hf_folder(run.args.load),
    "a model with routed experts": lambda run: has_experts(run.config),
    "a model that soft-caps its logits": lambda run: run.config.get("final_logit_softcapping"),
    "a rate that the user chose": lambda run: "lr" in run.args.explicit,
}
"""Each fact by its name in conditions."""
