"""``--advantage-estimator by_source``: an estimator for each data set of a mixture."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from slime.algorithms.algorithm import (
    Algorithm,
    Entries,
    EstimatorSettings,
    Row,
    Scored,
    checked_numbers,
    subtract_baseline,
)
from slime.algorithms.grpo import Grpo
from slime.algorithms.sequences import Reduce, Reducer, keep_where
from slime.config.args import FLAGS
from slime.config.flag import out_of_range
from slime.plugins.mixture import BySourceFlags, EstimatorChoice
from slime.registry import find, load, parts

if TYPE_CHECKING:
    from torch import Tensor

    from slime.config.args import Args

CLIPS = ("eps_clip", "eps_clip_high", "eps_clip_c")
"""The settings of all estimators that a data set may have for itself."""


def estimator_of(choice: EstimatorChoice, settings: EstimatorSettings) -> Algorithm:
    """Return the estimator of one data set, with the settings of the run in which it names none.

    Raises:
        ValueError: It cannot be used for a data set. The message says why.
    """
    named = choice if isinstance(choice, Mapping) else {"name": choice}
    name = named.get("name")
    given = {key: value for key, value in named.items() if key != "name"}
    part = parts("algorithm").get(str(name))
    if part is None:
        raise ValueError(f"{name!r} is none of {', '.join(parts('algorithm'))}")
    kind: type[Algorithm] = find("algorithm", part.name)
    beyond = kind.needs_critic or kind.needs_squared_probs or kind.uses_kl_in_reward
    if beyond or kind is BySource or part.name in parts("group listener"):
        raise ValueError(f"{name} is for a whole run: it needs more than the samples of a data set")
    own_kind = load(part.flags)
    own_names = [] if own_kind is None else [field.name for field in fields(own_kind)]
    for flag, value in [*given.items()]:
        if flag not in (*CLIPS, *own_names):
            raise ValueError(f"{name} has no {flag}; it has {', '.join((*CLIPS, *own_names))}")
        try:
            given[flag] = FLAGS[flag].value_type(value)  # YAML reads 3e-4 as a text
        except (TypeError, ValueError):
            raise ValueError(f"{flag} {value!r} is no {FLAGS[flag].value_type.__name__}") from None
        if problem := out_of_range(FLAGS[flag], given[flag]):
            raise ValueError(f"{flag} {value}: {problem}")
    clips: dict[str, Any] = {flag: value for flag, value in given.items() if flag in CLIPS}
    if "eps_clip" in clips:
        clips.setdefault("eps_clip_high", clips["eps_clip"])
    own = {flag: value for flag, value in given.items() if flag in own_names}
    made = None if own_kind is None else own_kind(**own)
    return kind(replace(settings, own=made, **clips))


def check(args: Args) -> list[str]:
    """Return what does not fit the estimators of the data sets."""
    problems = []
    for source, choice in (args.source_estimators or {}).items():
        where = f"the estimator of data set {source}"
        try:
            kind = type(estimator_of(choice, EstimatorSettings()))
        except ValueError as error:
            problems.append(f"{where}: {error}")
            continue
        missing = [name for name in kind.requires if not getattr(args, name)]
        extra = [name for name in kind.forbids if getattr(args, name)]
        problems += [
            f"{where} needs {FLAGS[name].option}: {kind.requires[name]}" for name in missing
        ]
        problems += [
            f"{where} and {FLAGS[name].option} exclude each other: {kind.forbids[name]}"
            for name in extra
        ]
    return problems


class BySource(Algorithm):
    """Calls the estimator of each data set with the samples of that data set alone. Without
    ``--source-estimators``, it is GRPO.
    """

    needs_old_log_probs = True
    zero_advantage_has_no_gradient = False  # some of them may have one
    row = Row(
        "that of the data set",
        "that of the data set",
        "`--source-estimators`, or `estimator` of the data sets of [a mixture](data.md#several-data-sets)",
        "",
    )

    def __init__(self, settings: EstimatorSettings) -> None:
        super().__init__(settings)
        own = settings.own if isinstance(settings.own, BySourceFlags) else BySourceFlags()
        chosen = own.source_estimators or {}
        self.whole = None if chosen else Grpo(settings)
        self.estimators = {name: estimator_of(one, settings) for name, one in chosen.items()}
        self.places: dict[str, list[int]] = {}
        self.lengths: list[int] = []

    def group_baseline(self, rewards: Sequence[float]) -> Sequence[float]:
        # With several, :meth:`batch_baseline` is called, and this is only tried.
        return (self.whole or Grpo(self.settings)).group_baseline(rewards)

    def batch_baseline(self, rollouts: Sequence[Scored]) -> Sequence[float] | None:
        if self.whole is not None:
            return None
        found = [0.0] * len(rollouts)
        sources = [rollout.metadata.get("source_name") for rollout in rollouts]
        for name, places in self._places(sources).items():
            own = [rollouts[i] for i in places]
            for i, value in zip(places, _baselines(self.estimators[name], own), strict=True):
                found[i] = value
        return found

    def advantages(self, batch: Entries) -> tuple[list[Tensor], list[Tensor]]:
        if self.whole is not None:
            return self.whole.advantages(batch)
        found = self._each(
            batch, lambda estimator, own, _: list(zip(*estimator.advantages(own), strict=True))
        )
        return [one for one, _ in found], [one for _, one in found]

    def over_ranks(self, batch: Entries, advantages: list[Tensor], reduce: Reduce) -> list[Tensor]:
        if self.whole is not None:
            return advantages
        return self._each(
            batch,
            lambda estimator, own, places: estimator.over_ranks(
                own, [advantages[i] for i in places], reduce
            ),
        )

    def of_samples(self, entries: Mapping[str, Sequence[Any]]) -> Algorithm:
        if self.whole is not None:
            return self.whole
        made = copy.copy(self)
        places = self._places(entries["source_names"])
        made.places = {name: own for name, own in places.items() if own}
        made.estimators = {
            name: self.estimators[name].of_samples(_some(entries, own, len(entries["tokens"])))
            for name, own in made.places.items()
        }
        # With context parallelism, these are the parts of this rank.
        made.lengths = [len(mask) for mask in entries["loss_masks"]]
        return made

    def ppo_kl(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        mask: Tensor,
        lengths: Sequence[int],
        reduce: Reduce,
    ) -> Tensor:
        def call(estimator: Algorithm, flat: list[Tensor], own: list[int]) -> tuple[Tensor]:
            new, old, mask = flat
            return (estimator.ppo_kl(new, old, mask, own, reduce),)

        return self._of_tokens(call, (log_probs, old_log_probs, mask))[0]

    def sequence_loss(
        self,
        ppo_kl: Tensor,
        log_probs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        lengths: Sequence[int],
        reduce: Reduce,
    ) -> tuple[Tensor, Tensor]:
        def call(estimator: Algorithm, flat: list[Tensor], own: list[int]) -> Sequence[Tensor]:
            kl, new, values, mask = flat
            return estimator.sequence_loss(kl, new, values, mask, own, reduce)

        loss, clipfrac = self._of_tokens(call, (ppo_kl, log_probs, advantages, mask))
        return loss, clipfrac

    def pg_reducer(self, mask: Tensor, default: Reducer) -> Reducer:
        import torch

        owners: list[tuple[Tensor, Reducer]] = []
        for name, places in self.places.items():
            chosen = [
                torch.full((length,), i in places, device=mask.device)
                for i, length in enumerate(self.lengths)
            ]
            own = torch.cat(chosen)
            owners.append((own, self.estimators[name].pg_reducer(keep_where(own, mask), default)))
        return lambda x: torch.stack([one(keep_where(own, x)) for own, one in owners]).sum()

    def notices(self) -> list[str]:
        return [
            f"data set {name}: {notice}"
            for name, one in self.estimators.items()
            for notice in one.notices()
        ]

    def _places(self, sources: Sequence[object]) -> dict[str, list[int]]:
        """Return the positions of the samples of each data set.

        Raises:
            ValueError: A data set has no estimator.
        """
        places: dict[str, list[int]] = {name: [] for name in self.estimators}
        for i, source in enumerate(sources):
            if source not in places:
                raise ValueError(
                    f"--source-estimators has no estimator of the data set {source!r} of a sample"
                )
            places[str(source)].append(i)
        return places

    def _each(
        self, batch: Entries, call: Callable[[Algorithm, Entries, list[int]], list[Any]]
    ) -> list[Any]:
        """Call each estimator with its part of a rank batch, also with none, because what it computes
        over all ranks is a collective operation.
        """
        count = len(batch["tokens"])
        found: list[Any] = [None] * count
        assert isinstance(batch, Mapping)
        for name, places in self._places(batch["source_names"]).items():
            own = call(self.estimators[name], _some(batch, places, count), places)
            for i, value in zip(places, own, strict=True):
                found[i] = value
        return found

    def _of_tokens(
        self,
        call: Callable[[Algorithm, list[Tensor], list[int]], Sequence[Tensor]],
        flat: Sequence[Tensor],
    ) -> list[Tensor]:
        """Call each estimator with its part of flat tensors ``[R]``, and put the results together."""
        import torch

        split = [x.split(self.lengths) for x in flat]
        found: dict[int, tuple[Tensor, ...]] = {}
        for name, places in self.places.items():
            own = [self.lengths[i] for i in places]
            parts = [torch.cat([x[i] for i in places]) for x in split]
            results = [x.split(own) for x in call(self.estimators[name], parts, own)]
            found |= dict(zip(places, zip(*results, strict=True), strict=True))
        return [
            torch.cat(column) for column in zip(*(found[i] for i in sorted(found)), strict=True)
        ]


def _baselines(estimator: Algorithm, rollouts: Sequence[Scored]) -> list[float]:
    """Return the rewards of some rollouts minus their baselines, as a run of these alone has them."""
    joint = estimator.batch_baseline(rollouts)
    if joint is not None:
        name = f"{type(estimator).__name__}.batch_baseline"
        return checked_numbers(name, joint, len(rollouts))
    groups: dict[object, list[int]] = {}
    for i, rollout in enumerate(rollouts):
        groups.setdefault(rollout.group, []).append(i)
    reduced = [
        zip(own, subtract_baseline(estimator, [rollouts[i].reward for i in own]), strict=True)
        for own in groups.values()
    ]
    return [value for _, value in sorted(chain.from_iterable(reduced))]


def _some(entries: Mapping[str, Any], places: Sequence[int], count: int) -> dict[str, Any]:
    """Return the entries of some of the samples; those of the whole batch stay."""
    return {
        name: [entry[i] for i in places]
        if isinstance(entry, list) and len(entry) == count
        else entry
        for name, entry in entries.items()
    }
