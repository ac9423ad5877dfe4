"""Rules about flags that depend on each other: how one is written, when it is broken, and what is
told then.

The rows are in ``tables/rules.json``, by topic; a plug-in registers its own as a :class:`RuleSet`.
Those of ``notices`` are told and not refused: values that are probably a mistake. Those of ``idle``
are flags that have no effect: the run is correct, but does not do what the user expects.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from slime.algorithms.algorithm import Algorithm
from slime.algorithms.dr_grpo import DrGrpo
from slime.algorithms.grpo import Grpo
from slime.config.algorithm import algorithm_class, known_where, loading_problem
from slime.config.args import spellings, underscored
from slime.config.data import can_evaluate
from slime.config.files import TABLES, read_json
from slime.config.hf_config import is_hf_folder, model_config
from slime.config.layout import context_ranks
from slime.config.lora import has_experts
from slime.config.machine import Machine, installed, this_machine
from slime.config.passthrough import Attributes, Spelling
from slime.config.rollout import (
    is_fully_async,
    may_use_workers,
    old_actor_lag,
    staleness_bound,
    trains_late,
)
from slime.config.settings import redacted
from slime.registry import Part, load, parts

if TYPE_CHECKING:
    from slime.config.args import Args

_COMPARISONS: dict[str, tuple[Any, str]] = {
    "%": (lambda value, unit: unit and value % unit, "not a multiple of"),
    ">=": (operator.ge, "not below"),
    "<=": (operator.le, "not above"),
    "==": (operator.eq, "the same as"),
    ">": (operator.gt, "above"),
    "<": (operator.lt, "below"),
}


class Rule(NamedTuple):
    """One rule. It is broken if ``when`` holds, and ``excludes`` too if there is one, but neither
    ``needs`` nor ``unless``.

    These four are conditions as a user would type them: ``--lora-rank`` (given, and not its
    default), ``--train-backend fsdp`` (this value), ``--lora-sync !=merged``, ``--rollout-top-p
    <1``, ``--min-lr >--lr`` (compared to another flag), and the names in
    :data:`slime.config.rules.FACTS`. They are joined by ``and``, which binds more tightly, and
    ``or``.

    Attributes:
        because: The reason, which follows the flags in the message. ``{needs_critic}`` stands for
            the built-in estimators of which this attribute of their class is true, ``{not
            needs_critic}`` for the others.
        instead: What to do; by default to leave one of the flags out.
        sets: The switch that is on by default if the rule is broken, which ``because`` tells.
        typed: Whether only values of ``when`` and ``excludes`` count that the user has set, not
            derived ones.
    """

    when: str
    because: str = ""
    instead: str = ""
    excludes: str = ""
    needs: str = ""
    unless: str = ""
    sets: str = ""
    typed: bool = False

    def broken(self, run: Run) -> list[tuple[list[str], list[str]]]:
        """Return the flags of ``when`` and ``excludes`` that break the rule, with their values, in
        pairs.
        """
        found = holding(self.when, run, self.typed)
        if not found or holding(f"{self.needs} or {self.unless}", run):
            return []
        others = holding(self.excludes, run, self.typed) if self.excludes else [[]]
        return [(flags, other) for flags in found for other in others]

    def sentences(self, run: Run) -> list[str]:
        """Return what is told about a run: nothing, or a line for each pair of flags that breaks
        the rule.
        """
        return [self._sentence(flags, other) for flags, other in self.broken(run)]

    def _sentence(self, flags: list[str], other: list[str]) -> str:
        told = _listed(flags + other)
        instead = self.instead
        if self.needs:
            told += f" {'needs' if len(flags) == 1 else 'need'} {self.needs}"
            instead = instead or f"add it, or leave {flags[-1]} out"
        elif other:
            told += " exclude each other"
            instead = instead or "leave one of them out"
        return f"{told}: {self.because}" + (f"; {instead}" if instead else "")


def _listed(words: list[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if words[1:] else words)


def holding(conditions: str, run: Run, typed: bool = False) -> list[list[str]]:
    """Return those of the conditions between ``or`` that hold: their flags with their values."""
    found = (
        [_words(part, run, typed) for part in one.split(" and ")]
        for one in conditions.split(" or ")
        if one
    )
    return [[word for word in words if word is not None] for words in found if None not in words]


def _words(part: str, run: Run, typed: bool) -> str | None:
    """Return a part of a condition with the value of its flag; None if it does not hold."""
    # A fact is told by its name.
    if fact := all_rules().facts.get(part):
        return part if fact(run) else None
    option, _, wanted = part.partition(" ")
    value, (flag, family, sets) = look_up(option, vars(run.args))
    # Options that are passed on exist only if they were typed.
    if typed and not family and flag.name not in run.args.explicit:
        return None
    # Both --x and --no-x are conditions, and each holds for its own value.
    if flag.is_bool:
        return option if value is sets else None
    told = ""
    if sign := next((sign for sign in _COMPARISONS if wanted.startswith(sign)), ""):
        wanted = wanted.removeprefix(sign)
        compare, says = _COMPARISONS[sign]
        if wanted.startswith("--"):
            other = look_up(wanted, vars(run.args))[0]
            told = f" ({says} {wanted} {other})"
        else:
            other = float(wanted)
        holds = None not in (value, other) and compare(value, other)
    elif wanted:
        values = map(str, value if isinstance(value, list) else [value])
        holds = (wanted.removeprefix("!=") in values) is not wanted.startswith("!=")
    else:
        # Of a derived value, 0 means off, as in --lora-rank 0.
        given = value or (isinstance(value, int | float) and (typed or not flag.derived))
        holds = given and value != flag.default
    if not holds:
        return None
    shown = redacted(flag.name, value)
    return f"{option} {' '.join(map(str, shown)) if isinstance(shown, list) else shown}{told}"


def look_up(option: str, attributes: Attributes) -> tuple[Any, Spelling]:
    """Return the value of a flag that is named as it is typed, and what this spelling stands
    for.
    """
    known = spellings()[underscored(option)]
    return known.values(attributes).get(known.flag.name), known


@dataclass(frozen=True)
class RuleSet:
    """What the core, or a plug-in, tells about flags.

    Attributes:
        table: The JSON file of its rows, by topic.
        facts: What conditions may ask besides values of flags, by name.
        checks: What is no row, because it reads files, or computes what to say. Each returns
            problems, with what to change, and may add to ``run.args.notices``.
    """

    table: Path
    facts: Mapping[str, Callable[[Run], object]] = field(default_factory=dict)
    checks: Sequence[Callable[[Run], list[str]]] = ()

    def rows(self) -> dict[str, list[Rule]]:
        """Return the rows by topic."""
        topics: dict[str, list[dict[str, Any]]] = read_json(self.table)
        return {topic: [_filled(Rule(**row)) for row in rows] for topic, rows in topics.items()}


def _filled(rule: Rule) -> Rule:
    return rule._replace(
        because=_with_estimators(rule.because), instead=_with_estimators(rule.instead)
    )


def _with_estimators(text: str) -> str:
    return re.sub(r"\{(not )?(\w+)\}", lambda match: known_where(match[2], not match[1]), text)


class AllRules(NamedTuple):
    """The rules of the core and of all plug-ins."""

    refused: list[Rule]
    notices: list[Rule]  # what is told and not refused
    idle: list[Rule]  # what has no effect
    defaults: list[Rule]  # which switches are on, unless the user chose otherwise
    facts: dict[str, Callable[[Run], object]]
    checks: list[Callable[[Run], list[str]]]


@functools.cache
def all_rules() -> AllRules:
    """Return all rules, which are read once."""
    core = RuleSet(TABLES / "rules.json", FACTS)
    found = AllRules([], [], [], [], {}, [])
    for one in (core, *map(_set_of, parts("rules").values())):
        topics = one.rows()
        found.notices.extend(topics.pop("notices", []))
        found.idle.extend(topics.pop("idle", []))
        found.defaults.extend(topics.pop("defaults", []))
        found.refused.extend(rule for rules in topics.values() for rule in rules)
        found.facts.update(one.facts)
        found.checks.extend(one.checks)
    return found


def _set_of(part: Part) -> RuleSet:
    """Return the rules of a plug-in, which may register nothing but ``package:table.json``."""
    found: Path | RuleSet = load(part.target)
    return RuleSet(found) if isinstance(found, Path) else found


def set_defaults(run: Run) -> None:
    """Turn on the switches that follow from other flags, and tell why if there is a reason to."""
    args = run.args
    for rule in all_rules().defaults:
        name = spellings()[underscored(rule.sets)].flag.name
        if name not in args.explicit and not vars(args)[name] and rule.broken(run):
            setattr(args, name, True)
            if rule.because:
                args.notices.append(
                    f"{rule.sets} is on: {rule.because} (off: --no-{rule.sets[2:]})"
                )
        args.fill(**{name: False})


def check_rules(run: Run) -> list[str]:
    """Return what is refused, and add to the notices of the arguments what is told only."""
    rules = all_rules()
    run.args.notices += [sentence for rule in rules.notices for sentence in rule.sentences(run)]
    problems = [problem for check in rules.checks for problem in check(run)]
    return problems + [sentence for rule in rules.refused for sentence in rule.sentences(run)]


def idle_flags(run: Run) -> list[tuple[str, str]]:
    """Return each flag that the user gave and that has no effect, with its value, and the reason.
    Nothing if the estimator cannot be loaded, which is a problem of its own."""
    told: dict[str, str] = {}
    idle = [] if loading_problem(run.args.advantage_estimator) else all_rules().idle
    for rule in idle:
        for flags, _ in rule._replace(typed=True).broken(run):
            told.setdefault(flags[0], rule.because or f"needs {rule.needs}")
    return list(told.items())


@dataclass(frozen=True)
class Run:
    """What rules, checks and derived defaults are about."""

    args: Args
    asynchronous: bool = False
    # looked up when a run is made, so that tests can pretend another machine
    machine: Machine = field(default_factory=lambda: this_machine())

    @property
    def algorithm(self) -> type[Algorithm]:
        """The estimator's class; if it cannot be loaded, which is a problem of its own, the base
        class.
        """
        name = self.args.advantage_estimator
        return Algorithm if loading_problem(name) else algorithm_class(name)

    @property
    def config(self) -> dict[str, Any]:
        """The model's config.json; empty if it is not on this machine."""
        return model_config(self.args.hf_checkpoint)

    @property
    def old_actor_lag(self) -> int | None:
        args = self.args
        return old_actor_lag(args, args.update_weights_interval, is_fully_async(args))

    @property
    def ranks(self) -> int:
        return self.args.actor_num_nodes * (self.args.actor_num_gpus_per_node or 1)


def _returns_groups(run: Run) -> object:
    """Whether unfinished groups can be left when a rollout has all that it needs."""
    args = run.args
    aborts = (
        args.over_sampling_batch_size > args.rollout_batch_size
        or args.dynamic_sampling_filter_path
        or run.asynchronous
    )
    return "rollout_function_path" in args.explicit or (aborts and not args.deterministic)


FACTS: dict[str, Callable[[Run], object]] = {
    "train_async.py": lambda run: run.asynchronous,
    "the fully asynchronous rollout": lambda run: is_fully_async(run.args),
    "a rollout function of slime": lambda run: may_use_workers(
        run.args.rollout_function_path, run.args.eval_function_path
    ),
    "groups that train in a later rollout": lambda run: trains_late(
        run.args, run.args.rollout_batch_size
    ),
    "groups that are aborted": _returns_groups,
    "an old actor that is one update behind": lambda run: run.old_actor_lag == 1,
    "samples of several weight versions": lambda run: run.old_actor_lag is None,
    "weights older than --max-weight-staleness": lambda run: (
        run.args.max_weight_staleness is not None
        and run.args.max_weight_staleness < run.args.update_weights_interval - 1
    ),
    "tokens of older weights": lambda run: staleness_bound(
        run.args.async_buffer_size, run.args.update_weights_interval, run.args.max_weight_staleness
    ),
    "a model of which some tensors are not sent": lambda run: (
        {"vision_config", "audio_config", "quantization_config"} & run.config.keys()
    ),
    "evaluation data": lambda run: can_evaluate(run.args, run.args.rollout_function_path),
    "use_rs of --custom-config-path": lambda run: vars(run.args).get("use_rs"),
    "tis_batch_normalize of --custom-config-path": lambda run: vars(run.args).get(
        "tis_batch_normalize"
    ),
    "an estimator that compares all groups of a rollout": lambda run: (
        run.algorithm.over_ranks is not Algorithm.over_ranks
        or run.algorithm.batch_baseline is not Algorithm.batch_baseline
    ),
    "a critic": lambda run: run.args.use_critic,
    "an estimator that compares the samples of a group": lambda run: run.algorithm.needs_group,
    "an estimator that discounts": lambda run: run.algorithm.discounts,
    "an estimator with a KL divergence in its reward": lambda run: run.algorithm.uses_kl_in_reward,
    "an estimator with a dual clip": lambda run: run.algorithm.policy_loss is Algorithm.policy_loss,
    "rewards that are divided by the standard deviation": lambda run: (
        run.algorithm.group_baseline is Grpo.group_baseline and run.args.rewards_normalization
    ),
    # only built-in classes have a row
    "an estimator of the user": lambda run: "row" not in vars(run.algorithm),
    "Dr. GRPO": lambda run: issubclass(run.algorithm, DrGrpo),
    "padded batches": lambda run: run.args.attn_implementation not in (None, "varlen"),
    "several training ranks": lambda run: run.ranks > 1,
    "several replicas": lambda run: run.args.fsdp_shard_size not in (None, run.ranks),
    "packs of a multiple of 16 tokens": lambda run: run.args.data_pad_size_multiplier % 16 == 0,
    "the package torchao": lambda run: installed("torchao"),
    "the package wandb": lambda run: installed("wandb"),
    "a GPU": lambda run: run.machine.cuda or run.machine.in_cluster,
    "a GPU of this machine": lambda run: run.machine.cuda,
    "a snapshot in --load": lambda run: run.args.load and not is_hf_folder(run.args.load),
    "a model with routed experts": lambda run: has_experts(run.config),
    "a model without routed experts": lambda run: run.config and not has_experts(run.config),
    "heads that context parallel ranks cannot divide": lambda run: (
        run.config.get("num_attention_heads", 0) % context_ranks(run.args.megatron)
    ),
    "a model with latent attention": lambda run: run.config.get("kv_lora_rank"),
    "a model with gated delta nets": lambda run: (
        "linear_attention" in (run.config.get("layer_types") or ())
    ),
    "a model with fused projections": lambda run: run.config.get("model_type") == "phi3",
    "a model that soft-caps its logits": lambda run: run.config.get("final_logit_softcapping"),
    "a rate that the user chose": lambda run: "lr" in run.args.explicit,
}
"""Each fact by its name in conditions."""
