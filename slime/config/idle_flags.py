"""Flags that have an effect only together with others, in one table, and values that are probably a mistake.

A run with such a flag is correct, but does not do what the user expects of it. So each is told, and none is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from slime.algorithms.algorithm import Algorithm
from slime.algorithms.dr_grpo import DrGrpo
from slime.algorithms.grpo import Grpo
from slime.config.algorithm import algorithm_class, known_where, loading_problem
from slime.config.flag import flags_of
from slime.config.rollout import OWN_FUNCTIONS, is_fully_async

if TYPE_CHECKING:
    from slime.config.args import Args


class Loop(NamedTuple):
    """What the conditions of the table ask about."""

    args: Args
    asynchronous: bool

    @property
    def algorithm(self) -> type[Algorithm]:
        return algorithm_class(self.args.advantage_estimator)

    def idle_flags(self) -> tuple[list[tuple[str, str]], list[str]]:
        """Look for the flags of the tables that the user has given.

        Returns:
            Each flag that has no effect, as it is typed, with the reason; and a notice for each value that is probably
            a mistake. None of both if the estimator cannot be loaded, which is a problem of its own.
        """
        if loading_problem(self.args.advantage_estimator):
            return [], []
        doubtful = [f"{typed} is probably not meant: {reason}" for typed, reason in self._without_effect(DOUBTFUL)]
        return self._without_effect(IDLE), doubtful

    def _without_effect(self, table: tuple[Row, ...]) -> list[tuple[str, str]]:
        flags = flags_of(type(self.args))
        told: dict[str, str] = {}
        for row in table:
            for name in row.flags:
                value, flag = getattr(self.args, name), flags[name]
                if name in self.args.explicit and value != flag.default and not row.works(self):
                    told.setdefault(flag.option if flag.is_bool else f"{flag.option} {value}", row.needs)
        return list(told.items())


class Row(NamedTuple):
    """Flags, the condition under which they have an effect, and what it asks for in words."""

    flags: tuple[str, ...]
    works: Callable[[Loop], object]
    needs: str


def _is_of_the_user(run: Loop) -> object:
    """Whether the user's own code computes advantages; what it reads is not known. Only built-in classes have a row."""
    return "row" not in vars(run.algorithm) or run.args.custom_advantage_function_path


def _has_kl(run: Loop) -> bool:
    return run.args.use_kl_loss or run.args.kl_coef != 0


def _reads_std(run: Loop) -> bool:
    return run.algorithm.group_baseline is Grpo.group_baseline and run.args.rewards_normalization


def _returns_groups(run: Loop) -> object:
    """Whether unfinished groups can be left when a rollout has all that it needs."""
    args = run.args
    fetches_more = args.over_sampling_batch_size > args.rollout_batch_size
    aborts = fetches_more or args.dynamic_sampling_filter_path or run.asynchronous
    own = "rollout_function_path" in args.explicit
    return own or (aborts and not args.deterministic)


def _evaluates(run: Loop) -> object:
    args = run.args
    own = args.eval_function_path not in (args.rollout_function_path, *OWN_FUNCTIONS)  # it may need no data
    return own or args.eval_prompt_data or args.eval_config


_EVALUATION = (
    *("eval_temperature", "eval_top_p", "eval_top_k", "eval_max_response_len", "eval_max_prompt_len"),
    *("eval_min_new_tokens", "eval_max_context_len", "n_samples_per_eval_prompt", "eval_reward_key"),
)  # fmt: skip

IDLE = (
    Row(
        ("gamma",),
        lambda run: _is_of_the_user(run) or run.algorithm.discounts,
        f"needs --advantage-estimator {known_where('discounts')}",
    ),
    Row(
        ("lambd", "value_clip", "critic_lr", "critic_lr_warmup_iters"),
        lambda run: _is_of_the_user(run) or run.algorithm.needs_critic,
        f"needs a critic: --advantage-estimator {known_where('needs_critic')}",
    ),
    Row(
        ("eps_clip_c",),
        lambda run: _is_of_the_user(run) or run.algorithm.policy_loss is Algorithm.policy_loss,
        "this estimator's loss has no dual clip",
    ),
    Row(
        ("grpo_std_normalization",),
        lambda run: _is_of_the_user(run) or _reads_std(run),
        "no rewards are divided by the standard deviation of their group here",
    ),
    Row(
        ("kl_coef",),
        lambda run: run.algorithm.uses_kl_in_reward,
        "this --advantage-estimator has no KL divergence in its reward: use --use-kl-loss with --kl-loss-coef",
    ),
    Row(("kl_loss_type", "ref_update_interval"), _has_kl, "no KL term is used (--use-kl-loss or --kl-coef)"),
    Row(("use_unbiased_kl",), lambda run: run.args.use_kl_loss, "needs --use-kl-loss"),
    Row(
        ("tis_clip", "tis_clip_low"),
        lambda run: run.args.use_tis or run.args.get_mismatch_metrics or run.args.custom_tis_function_path,
        "needs --use-tis",
    ),
    Row(("opsm_delta",), lambda run: run.args.use_opsm, "needs --use-opsm"),
    Row(("opd_kl_coef",), lambda run: run.args.use_opd, "needs --use-opd"),
    Row(("overlong_penalty",), lambda run: run.args.overlong_buffer_len, "needs --overlong-buffer-len"),
    Row(
        ("overlong_buffer_len",),
        lambda run: not run.args.custom_reward_post_process_path,
        "--custom-reward-post-process-path replaces it",
    ),
    Row(
        ("keep_old_actor",),
        lambda run: not run.args.use_rollout_logprobs,
        "--use-rollout-logprobs takes the old log-probs from the engine, so the copy of the weights is never read",
    ),
    Row(
        ("partial_rollout",),
        _returns_groups,
        "no group is aborted: it needs --over-sampling-batch-size above --rollout-batch-size, "
        "--dynamic-sampling-filter-path or train_async.py, without --deterministic",
    ),
    Row(
        ("partial_rollout", "over_sampling_batch_size"),
        lambda run: not is_fully_async(run.args),
        "the fully asynchronous rollout generates all the time, and continues groups anyway",
    ),
    Row(
        ("async_buffer_size", "update_weights_interval", "max_weight_staleness", "replay_schedule"),
        lambda run: run.asynchronous,
        "it is for train_async.py",
    ),
    Row(
        ("update_weight_disk_dir", "update_weight_disk_keep_files"),
        lambda run: run.args.update_weight_transport == "disk",
        "needs --update-weight-transport disk",
    ),
    Row(("max_tokens_per_gpu",), lambda run: run.args.use_dynamic_batch_size, "needs --use-dynamic-batch-size"),
    Row(
        ("log_probs_max_tokens_per_gpu",),
        lambda run: run.args.attn_implementation in (None, "varlen"),
        "batches are padded (--attn-implementation)",
    ),
    Row(
        _EVALUATION,
        _evaluates,
        "there is no evaluation: add --eval-prompt-data or --eval-config",
    ),
    Row(
        ("save_keep_last", "save_retain_interval", "async_save"),
        lambda run: run.args.save or run.args.save_hf,
        "needs --save or --save-hf",
    ),
)  # fmt: skip

DOUBTFUL = (
    Row(
        ("tis_clip",),
        lambda run: not run.args.use_tis or run.args.tis_clip >= 1 or run.args.custom_tis_function_path,
        "below 1, it scales down every token, also those whose importance ratio is 1; usual values are 2 to 10",
    ),
    Row(
        ("normalize_advantages",),
        lambda run: not issubclass(run.algorithm, DrGrpo),
        "it brings back the division by a standard deviation that Dr. GRPO removes",
    ),
)
