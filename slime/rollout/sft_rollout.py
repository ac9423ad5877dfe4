"""Supervised fine-tuning as a rollout: conversations come from the data set, and nothing is
generated.

Use with ``--rollout-function-path slime.rollout.sft_rollout.generate_rollout --loss-type sft_loss
--input-key messages`` and without ``--apply-chat-template``.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from slime.config.hf_config import context_length, end_token_ids, model_config
from slime.data.masks import MultiTurnLossMaskGenerator, untrained
from slime.data.sample import Sample, flatten
from slime.data.source import DataSource
from slime.observability import progress
from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.ends import text_of
from slime.rollout.prompts import encode_conversation
from slime.rollout.state import GenerateState

if TYPE_CHECKING:
    from slime.config.args import Args

logger = logging.getLogger(__name__)


def generate_rollout(
    args: Args, rollout_id: int, data_source: DataSource, evaluation: bool = False
) -> RolloutFnTrainOutput:
    """Return ``--rollout-batch-size`` groups of conversations with their loss masks
    (``--loss-mask-type``).

    Raises:
        ValueError: ``evaluation`` is True, or a conversation has no assistant turn to train on.
    """
    if evaluation:
        raise ValueError(
            "SFT has no evaluation: set --eval-function-path, or do not set --eval-interval"
        )
    state = GenerateState(args)
    masks = mask_generator(state)
    groups = data_source.get_samples(args.rollout_batch_size)
    for done, group in enumerate(groups):
        for sample in flatten(group):
            encode_sample(sample, state, masks)
        progress.report("generate", done + 1, len(groups))
    limit = context_length(model_config(args.hf_checkpoint))
    lengths = [len(sample.tokens) for sample in flatten(groups)]
    if limit and (longer := sum(length > limit for length in lengths)):
        logger.warning(
            "rollout %d: %d of %d conversations are longer than the model's context of %d tokens (up "
            "to %d); they are trained whole: leave them out of the data if that is not intended",
            rollout_id,
            longer,
            len(lengths),
            limit,
            max(lengths),
        )
    return RolloutFnTrainOutput(samples=groups)


def mask_generator(state: GenerateState) -> MultiTurnLossMaskGenerator:
    """Return what decides which tokens of a conversation are trained on."""
    args = state.args
    # else the checkpoint says nothing
    stop_ids = state.end_token_ids if end_token_ids(args.hf_checkpoint) else ()
    return MultiTurnLossMaskGenerator(
        state.tokenizer, args.loss_mask_type, args.apply_chat_template_kwargs, stop_ids
    )


def encode_sample(sample: Sample, state: GenerateState, masks: MultiTurnLossMaskGenerator) -> None:
    """Set the tokens and the loss mask of a sample whose prompt is a conversation.

    Raises:
        ValueError: No assistant turn of the conversation is to be trained on.
    """
    if problem := untrained(sample.prompt):
        raise ValueError(f"sample {sample.index}: {problem}")
    assert isinstance(sample.prompt, list)
    tools = sample.metadata.get("tools")
    try:
        if sample.multimodal_inputs:
            ids = encode_conversation(state, sample)
            tokens, mask = masks.get_loss_mask_with_multimodal_alignment(sample.prompt, ids, tools)
        else:
            tokens, mask = masks.get_loss_mask(sample.prompt, tools=tools)
    except ValueError as error:
        raise ValueError(f"sample {sample.index}: {error}") from error
    length = masks.get_response_lengths([mask])[0]
    if not length:
        raise ValueError(
            f"sample {sample.index}: no assistant turn of its conversation is to be trained on"
        )
    sample.tokens = tokens
    sample.response_length = length
    sample.loss_mask = mask[-length:]
    sample.response = text_of(state.tokenizer, state.end_token_ids, tokens[-length:])
    sample.reward = 0.0
    sample.status = Sample.Status.COMPLETED
