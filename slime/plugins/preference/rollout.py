"""A rollout of pairs: they come from the data set, and nothing is generated."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from slime.data.sample import Group, Sample, flatten
from slime.data.source import DataSource
from slime.plugins.preference.kto import with_mismatched
from slime.plugins.preference.texts import prompt_and_answer
from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.prompts import encode
from slime.rollout.state import GenerateState

if TYPE_CHECKING:
    from slime.config.args import Args


def generate_rollout(
    args: Args, rollout_id: int, data_source: DataSource, evaluation: bool = False
) -> RolloutFnTrainOutput:
    """Return ``--rollout-batch-size`` rows. A row is one rollout: of two samples for a pair, the
    chosen response and the rejected one, and for KTO (:func:`with_mismatched`) of twice as many as it
    has responses.

    Raises:
        ValueError: ``evaluation`` is True, or a response has no tokens.
    """
    if evaluation:
        raise ValueError(
            "pairs are not evaluated: set --eval-function-path, or do not set --eval-interval"
        )
    state = GenerateState(args)
    groups: list[Group] = []
    for group in data_source.get_samples(args.rollout_batch_size):
        (pair,) = flatten(group)
        assert isinstance(pair.label, dict), "the data source makes pairs"
        groups.append([[filled(state, pair, name) for name in pair.label]])
    if args.loss_type == "kto":
        groups = with_mismatched(groups, args.kto_desirable_weight, args.kto_undesirable_weight)
    return RolloutFnTrainOutput(samples=groups)


def filled(state: GenerateState, pair: Sample, name: str) -> Sample:
    """Return the sample of one response of a pair."""
    assert isinstance(pair.label, dict), "the data source makes pairs"
    options = pair.apply_chat_template_kwargs
    answer: Any = pair.label[name]
    try:
        prompt, response = prompt_and_answer(state.tokenizer, pair.prompt, answer, **options)
    except ValueError as error:
        raise ValueError(f"sample {pair.index}: {error}") from error
    sample = copy.copy(pair)
    ids = encode(state.tokenizer, response)
    if not ids:
        raise ValueError(f"sample {pair.index}: its {name} response has no tokens")
    sample.tokens = encode(state.tokenizer, prompt) + ids
    sample.response = response
    sample.response_length = len(ids)
    if state.args.loss_type == "reward_model":
        # A value is read before each response token. One more token makes the value after the last
        # one, which is the score; it is attended to by none.
        sample.tokens = [*sample.tokens, ids[-1]]
        sample.loss_mask = [0] * len(ids) + [1]
        sample.response_length = len(ids) + 1
    sample.reward = float(name == "chosen")
    sample.status = Sample.Status.COMPLETED
    return sample
