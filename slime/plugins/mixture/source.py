"""The data source of a mixture: each prompt comes from one of several data sets, by their
weights.
"""

from __future__ import annotations

import logging
from itertools import accumulate
from typing import TYPE_CHECKING

from slime.config.data import DEFAULT_DATA_SOURCE
from slime.config.files import NamedDataError, data_name
from slime.config.seeds import derive_seed
from slime.data.sample import Sample
from slime.data.source import (
    RolloutDataSource,
    RolloutDataSourceWithBuffer,
    SourceState,
    deep_copy,
)
from slime.data.validate import check_data
from slime.plugins.mixture.config import MixedSet, read_mixture, weight_at
from slime.rollout.rm_hub.reward import check_label

if TYPE_CHECKING:
    from slime.config.args import Args

logger = logging.getLogger(__name__)


def args_of(args: Args, mixed: MixedSet) -> Args:
    """Return the arguments of a run that had only this data set.

    Raises:
        NamedDataError: The data set has a name, and cannot be loaded.
    """
    named = data_name(mixed.path)
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
    for mixed in read_mixture(args.prompt_mixture or ""):
        try:
            own = args_of(args, mixed).with_values(eval_prompt_data=None, eval_config=None)
            found = check_data(own, check_label)
        except NamedDataError as error:
            found = [str(error)]
        problems += [f"data set {mixed.name}: {line}" for line in found]
    return problems


class MixtureSource(RolloutDataSourceWithBuffer):
    """Draws each prompt from one of the data sets of ``--prompt-mixture``.

    Which one depends only on the seed and the number of the group, and each data set has epochs of
    its own, so a resumed run continues exactly.
    """

    def __init__(self, args: Args) -> None:
        self.mixed = read_mixture(args.prompt_mixture or "")
        self.children = [RolloutDataSource(args_of(args, one)) for one in self.mixed]
        # The prompts are those of the children.
        super().__init__(args.with_values(rollout_global_dataset=False))
        self.args = args

    def __len__(self) -> int:
        return sum(map(len, self.children))

    def _next_prompt(self) -> Sample:
        # The schedule counts prompts, so it does not depend on how many groups a filter drops.
        rollout = self.sample_group_index / self.args.rollout_batch_size
        ends = [*accumulate(weight_at(one.weight, rollout) for one in self.mixed)]
        draw = derive_seed(self.args.rollout_seed, "mixture", self.sample_group_index)
        place = draw / 2**31 * ends[-1]
        number = next(i for i, end in enumerate(ends) if place < end or i == len(ends) - 1)
        mixed = self.mixed[number]
        prompt = deep_copy(self.children[number]._next_prompt())
        prompt.metadata["source_name"] = mixed.name
        if mixed.rm_type is not None:
            prompt.metadata.setdefault("rm_type", mixed.rm_type)
            prompt.custom_rm_path = ""  # its type counts, also with --custom-rm-path
        if mixed.custom_rm_path is not None:
            prompt.custom_rm_path = mixed.custom_rm_path
        if mixed.generate_function_path is not None:
            prompt.generate_function_path = mixed.generate_function_path
        return prompt

    def state_dict(self) -> SourceState:
        children = {
            mixed.name: child.state_dict()
            for mixed, child in zip(self.mixed, self.children, strict=True)
        }
        return {**super().state_dict(), "mixture": children}

    def load_state_dict(self, state: SourceState) -> None:
        super().load_state_dict(state)
        saved = state.get("mixture") or {}
        for mixed, child in zip(self.mixed, self.children, strict=True):
            if mixed.name in saved:
                child.load_state_dict(saved[mixed.name])
            else:
                logger.warning("the data set %s is new: it starts from its beginning", mixed.name)
