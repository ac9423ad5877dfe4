"""The data source of a mixture: each prompt comes from one of several data sets, by their
weights, which may follow how often its prompts were solved (curricula by pass rate).
"""

from __future__ import annotations

import bisect
import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import fmean
from typing import TYPE_CHECKING, Any

from slime.config.data import DEFAULT_DATA_SOURCE
from slime.config.files import NamedDataError, data_name
from slime.config.seeds import derive_seed
from slime.data.rewards import PASS_ABOVE
from slime.data.sample import Group, Sample, flatten
from slime.data.source import (
    DataSource,
    RolloutDataSource,
    RolloutDataSourceWithBuffer,
    SourceState,
    deep_copy,
)
from slime.data.validate import check_data
from slime.plugins.agents.config import ENVIRONMENT_GENERATE
from slime.plugins.agents.environments.source import EnvironmentSource, check_environment
from slime.plugins.mixture import MixedSet, read_mixture, weight_at
from slime.rollout.rm_hub.reward import check_label

if TYPE_CHECKING:
    from slime.config.args import Args


WINDOW = 32
"""The pass rate of a data set is that of so many of its newest groups."""
ROW = "mixture_row"
"""The key of ``Sample.metadata`` with the row of a sample, of a data set with ``pass_rate``."""


def row_of(prompt: Sample) -> str:
    """Return a name of a row that depends on its prompt and label only."""
    text = json.dumps([prompt.prompt, prompt.label], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@dataclass
class PassRates:
    """The pass rates of one data set. They do not depend on the order in which groups are judged.

    Attributes:
        newest: The number and the pass rate of each of the :data:`WINDOW` newest groups.
        rows: The pass rate of each row when it came last, with the number of its group.
    """

    newest: list[tuple[int, float]] = field(default_factory=list)
    rows: dict[str, tuple[int, float]] = field(default_factory=dict)

    def add(self, group: int, rate: float, row: str | None) -> None:
        """Add a judged group."""
        bisect.insort(self.newest, (group, rate))
        del self.newest[:-WINDOW]
        if row is not None:
            self.rows[row] = max(self.rows.get(row, (-1, 0.0)), (group, rate))

    def has_reached(self, rate: float) -> bool:
        """Return whether the mean of the newest groups is at least this, and their number enough."""
        return len(self.newest) == WINDOW and fmean(one for _, one in self.newest) >= rate

    def allows(self, row: str, bounds: Sequence[float]) -> bool:
        """Return whether a row is within the bounds, or has not come yet."""
        known = self.rows.get(row)
        return known is None or bounds[0] <= known[1] <= bounds[1]

    def state_dict(self) -> dict[str, Any]:
        return {"newest": list(self.newest), "rows": dict(self.rows)}

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> PassRates:
        """The inverse of :meth:`state_dict`."""
        rows = {row: (int(group), float(rate)) for row, (group, rate) in state["rows"].items()}
        return cls([(int(group), float(rate)) for group, rate in state["newest"]], rows)


logger = logging.getLogger(__name__)


def args_of(args: Args, mixed: MixedSet) -> Args:
    """Return the arguments of a run that had only this data set.

    Raises:
        NamedDataError: The data set has a name, and cannot be loaded.
    """
    if mixed.environment is not None:
        args = args.with_values(environment=mixed.environment)
    named = None if mixed.path is None else data_name(mixed.path)
    return args.with_values(
        prompt_data=mixed.path if named is None else named.file(),
        data_source_path=DEFAULT_DATA_SOURCE,
        rm_type=mixed.rm_type or args.rm_type,
        custom_rm_path=mixed.custom_rm_path or (None if mixed.rm_type else args.custom_rm_path),
        custom_generate_function_path=mixed.generate_function_path
        or args.custom_generate_function_path,
        input_key=mixed.input_key or args.input_key,
        label_key=mixed.label_key or args.label_key,
    )


def check(args: Args) -> list[str]:
    """Return the problems of the rows and labels of all data sets."""
    problems = []
    try:
        sets = read_mixture(args.prompt_mixture or "")
    except ValueError:  # told when the flags were resolved
        return []
    for mixed in sets:
        try:
            own = args_of(args, mixed).with_values(eval_prompt_data=None, eval_config=None)
            kept = mixed.environment is None
            found = check_data(own, check_label) if kept else check_environment(own)
        except NamedDataError as error:
            found = [str(error)]
        problems += [f"data set {mixed.name}: {line}" for line in found]
    return problems


def listen(args: Args, source: DataSource, event: str, group: Group) -> None:
    """Tell the source which groups have rewards, also of those that a filter drops."""
    if event in ("accepted", "filtered") and isinstance(source, MixtureSource):
        source.judged(group)


class MixtureSource(RolloutDataSourceWithBuffer):
    """Draws each prompt from one of the data sets of ``--prompt-mixture``.

    Which one depends only on the seed, the number of the group and, with ``after``, the pass rates
    so far. Each data set has epochs of its own, and the rates are in the snapshot, so a resumed run
    continues exactly.
    """

    def __init__(self, args: Args) -> None:
        self.mixed = read_mixture(args.prompt_mixture or "")
        self.children: list[RolloutDataSource] = [
            RolloutDataSource(args_of(args, one))
            if one.environment is None
            else EnvironmentSource(args_of(args, one))
            for one in self.mixed
        ]
        # The prompts are those of the children.
        super().__init__(args.with_values(rollout_global_dataset=False))
        self.args = args
        self.rates = {one.name: PassRates() for one in self.mixed}
        self.begun = {one.name for one in self.mixed if not one.after}

    def __len__(self) -> int:
        return sum(map(len, self.children))

    def _next_prompt(self) -> Sample:
        # The schedule counts prompts, so it does not depend on how many groups a filter drops.
        rollout = self.sample_group_index / self.args.rollout_batch_size
        self.begun |= {one.name for one in self.mixed if self._may_begin(one)}
        weights = [
            weight_at(one.weight, rollout) if one.name in self.begun else 0.0 for one in self.mixed
        ]
        ends = [*accumulate(weights)]
        draw = derive_seed(self.args.rollout_seed, "mixture", self.sample_group_index)
        place = draw / 2**31 * ends[-1]
        number = next(i for i, end in enumerate(ends) if place < end or i == len(ends) - 1)
        mixed = self.mixed[number]
        prompt = deep_copy(self._next_of(mixed, self.children[number]))
        prompt.metadata["source_name"] = mixed.name
        prompt.sampling_params = {**(mixed.sampling or {})}
        if mixed.pass_rate is not None:
            prompt.metadata[ROW] = row_of(prompt)
        if mixed.rm_type is not None:
            prompt.metadata.setdefault("rm_type", mixed.rm_type)
            prompt.custom_rm_path = ""  # its type counts, also with --custom-rm-path
        if mixed.custom_rm_path is not None:
            prompt.custom_rm_path = mixed.custom_rm_path
        if mixed.environment is not None:
            prompt.generate_function_path = ENVIRONMENT_GENERATE
            # The reward is the environment's, also if the run has a function for others.
            prompt.custom_rm_path = ""
        if mixed.generate_function_path is not None:
            prompt.generate_function_path = mixed.generate_function_path
        return prompt

    def _may_begin(self, mixed: MixedSet) -> bool:
        wanted = (mixed.after or {}).items()
        return all(self.rates[name].has_reached(rate) for name, rate in wanted)

    def _next_of(self, mixed: MixedSet, child: RolloutDataSource) -> Sample:
        """Return the next prompt of a data set whose pass rate is within its bounds; the next one at
        all, if an epoch has none.
        """
        prompt = first = child._next_prompt()
        if mixed.pass_rate is None:
            return prompt
        rates = self.rates[mixed.name]
        for _ in range(len(child)):
            if rates.allows(row_of(prompt), mixed.pass_rate):
                return prompt
            prompt = child._next_prompt()
        return first

    def judged(self, group: Group) -> None:
        """Count the passes of a group that has rewards."""
        samples = flatten(group)
        rewards = [one.get_reward_value(self.args) for one in samples if not one.reward_timed_out]
        passes = [float(reward) > PASS_ABOVE for reward in rewards if reward is not None]
        known = self.rates.get(str(samples[0].metadata.get("source_name")))
        if passes and known is not None and samples[0].group_index is not None:
            known.add(samples[0].group_index, fmean(passes), samples[0].metadata.get(ROW))

    def state_dict(self) -> SourceState:
        children = {
            mixed.name: child.state_dict()
            for mixed, child in zip(self.mixed, self.children, strict=True)
        }
        rates = {name: one.state_dict() for name, one in self.rates.items()}
        curriculum = {"rates": rates, "begun": sorted(self.begun)}
        return {**super().state_dict(), "mixture": children, "curriculum": curriculum}

    def load_state_dict(self, state: SourceState) -> None:
        super().load_state_dict(state)
        saved = state.get("mixture") or {}
        curriculum = state.get("curriculum") or {"rates": {}, "begun": []}
        self.begun |= {*curriculum["begun"]}
        self.rates |= {
            name: PassRates.of_state(one)
            for name, one in curriculum["rates"].items()
            if name in self.rates
        }
        for mixed, child in zip(self.mixed, self.children, strict=True):
            if mixed.name in saved:
                child.load_state_dict(saved[mixed.name])
            else:
                logger.warning("the data set %s is new: it starts from its beginning", mixed.name)
