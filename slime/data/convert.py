"""Converts samples into train data (lists with one entry per sample), and splits these over
data-parallel ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import numpy as np

from slime.config.args import Args
from slime.config.flag import did_you_mean
from slime.config.hf_config import config_once
from slime.config.hooks import load_function
from slime.config.layout import ParallelLayout
from slime.data.fields import (
    BY_NAME,
    FIELDS,
    RankBatch,
    TrainData,
    Wire,
    pack_part,
)
from slime.data.packing import shared_beginnings
from slime.data.rewards import post_process_rewards, shares_in_rollouts
from slime.data.sample import Group, Sample, flatten
from slime.data.schedule import PackingSettings, build_dp_schedule, cut
from slime.data.staleness import add_staleness
from slime.data.token_fields import TOKEN_FIELDS, is_unset

logger = logging.getLogger(__name__)


def samples_to_train_data(args: Args, groups: Sequence[Group | Sample]) -> TrainData:
    """Convert the samples of a rollout.

    Args:
        groups: A list of samples for each prompt; a rollout that fanned out is a list of samples in
            place of one. A flat list of samples is accepted as well if every sample has a
            ``group_index``.

    Returns:
        A dict of lists with one entry per sample, in the given order; an entry with one number per
        token is an array.

        Always: ``tokens, response_lengths, rewards, raw_reward, truncated, sample_indices,
        group_indices, rollout_ids, loss_masks, rollout_mask_sums``. Only if samples have them:
        ``rollout_log_probs, teacher_log_probs, rollout_routed_experts, rollout_top_p_token_ids,
        rollout_top_p_token_offsets, round_number, source_names, metadata, multimodal_train_inputs,
        weight_versions``. An optional entry exists for all samples or for none.

    Raises:
        ValueError: A sample cannot be trained on, or only some samples have a field that the loss
            needs; the message names the sample.
    """
    # Keys and ids first, also for a custom converter, which may leave them out.
    samples = flatten(groups)
    if not samples:
        raise ValueError("a rollout without samples cannot be trained on")
    keys = _group_keys(groups)
    rollout_ids = _rollout_ids(groups, keys)
    hook = args.custom_convert_samples_to_train_data_path
    if hook:
        data = load_function(hook)(args, samples)
        return _complete_custom(hook, data, samples, keys, rollout_ids)
    # From here on only arrays are read: lists of Python numbers would take ten times the memory.
    vocabulary = config_once(args.hf_checkpoint).get("vocab_size")
    for sample in samples:
        sample.pack()
        _check_lengths(sample)
        _check_vocabulary(sample, vocabulary)
    masks = [_loss_mask(sample) for sample in samples]
    raw, rewards = post_process_rewards(args, samples, keys, rollout_ids)
    data = {
        "tokens": [s.array("tokens") for s in samples],
        "response_lengths": [s.response_length for s in samples],
        "rewards": rewards,
        "raw_reward": raw,
        "loss_masks": masks,
        "rollout_mask_sums": _mask_sums(masks, rollout_ids),
        **_bookkeeping(samples, keys, rollout_ids),
    }
    if args.observation_loss_coef:
        data["observation_masks"] = [
            _observation_mask(s, mask) for s, mask in zip(samples, masks, strict=True)
        ]
    data.update(_optional(args, samples, masks))
    return data


def parts_of_ranks(
    args: Args,
    groups: Sequence[Group | Sample],
    rollout_id: int,
    *layouts: ParallelLayout,
    finished: Sequence[Group | Sample] | None = None,
) -> Iterator[Wire]:
    """Convert the samples of a rollout, and yield the part of each data-parallel rank of each
    layout.

    A part copies the tokens of its samples. It is made when it is asked for, so that a caller that
    passes on one after the other never holds a second copy of the whole rollout.

    Args:
        finished: The groups in the order in which ``--train-during-rollout`` divides them, if it is
            another one.

    Raises:
        ValueError: As for :func:`samples_to_train_data`, before the first part.
    """
    train_data = samples_to_train_data(args, groups)
    samples = flatten(groups)
    add_staleness(train_data, samples, rollout_id)
    packing = PackingSettings.from_args(args)
    together: list[list[int]] | None = None
    for layout in layouts:
        if args.train_during_rollout > 1:
            place = {id(sample): position for position, sample in enumerate(samples)}
            together = [
                sorted(place[id(sample)] for sample in flatten(part))
                for part in cut(finished or groups, args, layout.dp)
            ]
        for part in each_part(packing, train_data, layout, together):
            yield {**part, "rollout_id": rollout_id}


def split_train_data(settings: PackingSettings, train_data: TrainData, ranks: int) -> list[Wire]:
    """Assign the samples to data-parallel ranks, and pack each rank's part for the object store.

    Args:
        train_data: The result of :func:`samples_to_train_data` or of a custom converter.
        ranks: Number of data-parallel ranks.

    Returns:
        One part per rank.
    """
    return list(each_part(settings, train_data, ParallelLayout(ranks)))


def each_part(
    settings: PackingSettings,
    train_data: TrainData,
    layout: ParallelLayout,
    trained_parts: Sequence[list[int]] | None = None,
) -> Iterator[Wire]:
    """As :func:`split_train_data`, but a part is made when it is asked for.

    Args:
        trained_parts: See ``parts`` of :func:`build_dp_schedule`.
    """
    lengths = [len(t) for t in train_data["tokens"]]
    global_batch_size = settings.global_batch_size
    if settings.steps:
        global_batch_size = max(len(set(train_data["rollout_ids"])) // settings.steps, 1)
    assert global_batch_size, "slime.config.layout derives it"
    partitions, micro_batches, num_microbatches, global_batch_sizes = build_dp_schedule(
        settings,
        layout,
        lengths,
        global_batch_size=global_batch_size,
        rollout_indices=train_data["rollout_ids"],
        prompts=shared_prompts(settings, train_data, layout.cp),
        parts=trained_parts,
    )
    # The global normalizer of each step is computed here, where the samples of all ranks are known.
    tokens_of = [max(int(np.sum(mask)), 1) for mask in train_data["loss_masks"]]
    shared = {
        "num_microbatches": num_microbatches,
        "global_batch_sizes": global_batch_sizes,
        "global_token_counts": _token_counts(
            partitions, micro_batches, num_microbatches, tokens_of
        ),
    }
    data = {**train_data, "total_lengths": lengths}
    if "raw_reward" in train_data:
        data["rollout_shares"] = shares_in_rollouts(
            train_data["rollout_ids"], train_data["raw_reward"]
        )
    for partition, batches in zip(partitions, micro_batches, strict=True):
        yield pack_part(data, partition, {**shared, "micro_batch_indices": batches})


def shared_prompts(
    settings: PackingSettings, data: TrainData | RankBatch, context_size: int
) -> list[tuple[Hashable, int]] | None:
    """For each sample, the key and the length of what it shares with other samples of its group in
    a pack.

    Of its shared beginnings, which packs store as a tree, this is the one that saves most per
    sample: the prompt of a group, or the turns before the branches of an agent's session. A sample
    that shares nothing has the key None. The result is None if nothing is shared at all, either
    because of the settings, or because the tokens of each sample are split over ``context_size``
    ranks.

    Args:
        data: The train data of a whole rollout, or a rank batch.
    """
    if not settings.shares_prompts or context_size > 1:
        return None
    # Without a copy of a whole rollout: token ids are stored in 32 bits.
    arrays = [np.asarray(tokens, np.int32) for tokens in data["tokens"]]
    lengths = [len(t) - int(r) for t, r in zip(arrays, data["response_lengths"], strict=True)]
    media = data.get("multimodal_train_inputs") or [None] * len(lengths)
    # Tokens with media are not shared: equal token ids do not mean that the images are equal.
    keys: list[Hashable] = [
        ("own", i) if own else ("group", group)
        for i, (group, own) in enumerate(zip(data["group_indices"], media, strict=True))
    ]
    chosen: list[tuple[Hashable, int]] = []
    for beginnings, length in zip(shared_beginnings(arrays, lengths, keys), lengths, strict=True):
        best = max(
            beginnings, key=lambda one: one.length * (one.samples - 1) / one.samples, default=None
        )
        chosen.append((None, length) if best is None else (best.number, best.length))
    return chosen


def _token_counts(
    partitions: list[list[int]],
    micro_batches: list[list[list[int]]],
    counts: list[int],
    tokens_of: list[int],
) -> list[int]:
    """For each step, the sum of max(mask sum, 1) over the samples of all ranks."""
    totals = [0] * len(counts)
    steps = [step for step, count in enumerate(counts) for _ in range(count)]
    for partition, batches in zip(partitions, micro_batches, strict=True):
        for step, batch in zip(steps, batches, strict=True):
            totals[step] += sum(tokens_of[partition[i]] for i in batch)
    return totals


def _group_keys(groups: Sequence[Group | Sample]) -> list[int]:
    """The group key of each sample: its ``group_index``, or if a hook made a sample without one,
    that of its list, which is a new number if no sample of the list has one.
    """
    numbers = [s.group_index for s in flatten(groups) if s.group_index is not None]
    unnumbered = max(numbers, default=-1) + 1
    keys: list[int] = []
    for position, group in enumerate(groups):
        samples = flatten(group)
        known = {s.group_index for s in samples if s.group_index is not None}
        if not known and isinstance(group, Sample):
            raise ValueError(
                f"sample {position} of a flat list has no group_index: return a list of groups, "
                "or let the data source set Sample.group_index"
            )
        if len(known) > 1 and any(s.group_index is None for s in samples):
            raise ValueError(
                f"group {position} has samples of groups {sorted(known)} and some without a "
                "group_index"
            )
        fallback = known.pop() if len(known) == 1 else unnumbered + position
        keys += [fallback if s.group_index is None else s.group_index for s in samples]
    return keys


def _rollout_ids(groups: Sequence[Group | Sample], keys: list[int]) -> list[int]:
    """The rollout id of each sample. Fan-out siblings share one; a rollout without an id gets a new
    one.
    """
    # An element of a group is one rollout: a sample, or the list of samples into which it fanned
    # out.
    rollouts = [
        flatten(rollout)
        for group in groups
        for rollout in ([group] if isinstance(group, Sample) else group)
    ]
    given = [s.rollout_id for rollout in rollouts for s in rollout if s.rollout_id is not None]
    fresh = max(given, default=-1) + 1
    ids: list[int] = []
    for rollout in rollouts:
        values = {s.rollout_id for s in rollout}
        if len(values) > 1:
            raise ValueError(
                f"the {len(rollout)} samples that one rollout fanned out into (sample "
                f"{rollout[0].index}) have rollout_ids {sorted(map(str, values))}: they must "
                "share one"
            )
        if values == {None}:
            ids += [fresh] * len(rollout)
            fresh += 1
        else:
            ids += [s.rollout_id for s in rollout if s.rollout_id is not None]
    # Samples of different groups with one id would be counted as one rollout, and normalized
    # together.
    group_of: dict[int, int] = {}
    for rollout_id, key in zip(ids, keys, strict=True):
        if group_of.setdefault(rollout_id, key) != key:
            raise ValueError(
                f"rollout_id {rollout_id} is used in group {group_of[rollout_id]} and in group "
                f"{key}: it must be unique in the batch (Sample.index is), or None"
            )
    return ids


def _check_lengths(sample: Sample) -> None:
    total = sample.num_tokens
    response = sample.response_length
    if not 0 <= response < total:
        raise ValueError(
            f"sample {sample.index} (group {sample.group_index}, {sample.status.value}) has "
            f"{total} tokens and response_length {response}: tokens must hold at least one prompt "
            "token and the whole response"
        )
    for name in ("rollout_log_probs", "teacher_log_probs"):
        _of_response(sample, name)


def _of_response(sample: Sample, name: str) -> np.ndarray | None:
    """A field with one number per response token, ``[response_length]``; None if it is not set."""
    values = None if is_unset(vars(sample)[name]) else sample.array(name)
    if values is not None and len(values) != sample.response_length:
        empty = "" if len(values) else " (set None if it has no values)"
        raise ValueError(
            f"sample {sample.index}: {name} has {len(values)} entries, the response "
            f"{sample.response_length} tokens{empty}"
        )
    return values


def _check_vocabulary(sample: Sample, size: int | None) -> None:
    """Refuse token ids without a row in the model's embedding: a GPU ends with an assertion that
    names nothing, and all later work of its process fails."""
    tokens = sample.array("tokens")
    assert tokens is not None, "its length was checked"
    if size is not None and not sample.multimodal_inputs and tokens.max() >= size:
        raise ValueError(
            f"sample {sample.index} has the token id {tokens.max()}, but the model of "
            f"--hf-checkpoint has {size} tokens: use its own tokenizer, or resize its embeddings "
            "for added tokens (resize_token_embeddings) and save it"
        )


def _loss_mask(sample: Sample) -> np.ndarray:
    """The loss mask, int8 [response_length]; all 0 for a removed sample, or if the verifier timed
    out.
    """
    if sample.remove_sample or sample.reward_timed_out:
        return np.zeros(sample.response_length, np.int8)
    mask = _of_response(sample, "loss_mask")
    return np.ones(sample.response_length, np.int8) if mask is None else mask


def _observation_mask(sample: Sample, trained: np.ndarray) -> np.ndarray:
    """The mask of ``--observation-loss-coef``, int8 [response_length]; all 0 for a sample of which
    nothing is trained.
    """
    if not trained.any():
        return np.zeros(sample.response_length, np.int8)
    mask = _of_response(sample, "observation_mask")
    if mask is not None:
        return mask * (trained == 0)
    log_probs = sample.array("rollout_log_probs")
    # A token that an engine sampled may be masked as well, in a part that an older rollout made.
    sampled = np.zeros(len(trained), bool) if log_probs is None else log_probs != 0
    return ((trained == 0) & ~sampled).astype(np.int8)


def _mask_sums(
    masks: Sequence[Sequence[int] | np.ndarray], rollout_ids: Sequence[int]
) -> list[float]:
    """For each sample, the sum of the masks of all samples of its rollout."""
    sums: dict[int, float] = {}
    for mask, rollout in zip(masks, rollout_ids, strict=True):
        sums[rollout] = sums.get(rollout, 0.0) + float(np.sum(mask))
    return [sums[rollout] for rollout in rollout_ids]


def _bookkeeping(samples: list[Sample], keys: list[int], rollout_ids: list[int]) -> TrainData:
    return {
        "truncated": [int(s.truncated) for s in samples],
        "sample_indices": [i if s.index is None else s.index for i, s in enumerate(samples)],
        "group_indices": keys,
        "rollout_ids": rollout_ids,
    }


def _optional(args: Args, samples: list[Sample], masks: list[np.ndarray]) -> TrainData:
    """Entries that exist only if some sample has them."""
    data: TrainData = {}
    # Off-policy correction that is on by default applies if log-probs exist; a flag on the command
    # line requires them.
    engine = ["--use-tis"] if args.use_tis and "use_tis" in args.explicit else []
    engine += ["--use-rollout-logprobs"] if args.use_rollout_logprobs else []
    engine += ["--get-mismatch-metrics"] if args.get_mismatch_metrics else []
    teacher = ["--use-opd"] if args.use_opd and args.opd_type == "sglang" else []
    replay = ["--use-rollout-routing-replay"] if args.use_rollout_routing_replay else []
    _per_token(data, "rollout_log_probs", samples, masks, engine)
    _per_token(data, "teacher_log_probs", samples, masks, teacher)
    _per_token(data, "rollout_routed_experts", samples, masks, replay)
    if any(s.rollout_top_p_token_offsets is not None for s in samples):
        # An empty nucleus means that the choice of the token was not restricted.
        for sample in samples:
            offsets, ids = sample.rollout_top_p_token_offsets, sample.rollout_top_p_token_ids
            nuclei = [0] * (sample.response_length + 1) if offsets is None else offsets
            data.setdefault("rollout_top_p_token_offsets", []).append(np.asarray(nuclei, np.int32))
            data.setdefault("rollout_top_p_token_ids", []).append(
                np.asarray([] if ids is None else ids, np.int32)
            )
    per_sample: dict[str, list[Any]] = {
        "metadata": [s.train_metadata for s in samples],
        "multimodal_train_inputs": [s.multimodal_train_inputs for s in samples],
        "round_number": [s.metadata.get("round_number") for s in samples],
        "source_names": [s.metadata.get("source_name") for s in samples],
    }
    data.update(
        {key: values for key, values in per_sample.items() if any(v is not None for v in values)}
    )
    if any(s.weight_versions for s in samples):
        data["weight_versions"] = [s.weight_versions for s in samples]
    return data


def _per_token(
    data: TrainData,
    name: str,
    samples: list[Sample],
    masks: list[np.ndarray],
    needed_by: list[str],
) -> None:
    """Add a field to ``data`` if every trained sample has it; otherwise leave it out for all
    samples, with a warning.

    Samples that are not trained may lack it: they get zeros, or no rows of experts, so that the
    trainer's router chooses them.

    Raises:
        ValueError: A trained sample lacks the field, but the flags ``needed_by`` need it.
    """
    values = [s.array(name) if name in TOKEN_FIELDS else getattr(s, name) for s in samples]
    if all(value is None for value in values) and not needed_by:
        return
    # A sample whose mask is all zero may lack the field, since its values are multiplied by zero.
    lacking = [
        s
        for s, value, mask in zip(samples, values, masks, strict=True)
        if value is None and mask.any()
    ]
    if not lacking:
        like = next((v for v in values if v is not None), np.zeros(0, np.uint8))
        scored = BY_NAME[name].per == "response token"
        data[name] = [
            np.zeros_like(like, shape=(s.response_length * scored, *like.shape[1:]))
            if value is None
            else value
            for s, value in zip(samples, values, strict=True)
        ]
        return
    said = (
        f"{len(lacking)} of {len(samples)} samples (the first is {lacking[0].index}) have no {name}"
    )
    if needed_by:
        raise ValueError(
            f"{said}, which {', '.join(needed_by)} needs: let the generate function set "
            f"Sample.{name}"
        )
    logger.warning(
        f"{said}: it is left out for all of them, and the trainer computes old log-probs"
    )


def _complete_custom(
    path: str, data: TrainData, samples: list[Sample], keys: list[int], rollout_ids: list[int]
) -> TrainData:
    """Add the entries that a custom converter may leave out, and check those that it returned."""
    flag = f"--custom-convert-samples-to-train-data-path {path}"
    if not isinstance(data, dict):
        raise ValueError(f"{flag} must return a dict, not {type(data).__name__}")
    missing = [key for key in ("tokens", "response_lengths", "rewards") if key not in data]
    if missing:
        raise ValueError(
            f"{flag}: {', '.join(missing)} missing; it returned {', '.join(map(str, data))}"
        )
    for name in data.keys() - BY_NAME.keys():
        # Only a warning: the entry may be meant for the user's own loss.
        if hint := did_you_mean(name, BY_NAME):
            logger.warning(f"{flag} returned an entry {name!r} that slime does not know{hint}")
    # With the same number of entries, they belong to the samples. Otherwise the converter merged or
    # split samples, and each entry counts as a rollout and a group of its own.
    count = len(data["tokens"])
    if count == len(samples):
        data = _bookkeeping(samples, keys, rollout_ids) | data
    else:
        own = list(range(count))
        defaults: TrainData = {
            "rollout_ids": own,
            "sample_indices": [*own],
            "truncated": [0] * count,
        }
        data = defaults | data
        data.setdefault("group_indices", list(data["rollout_ids"]))
    data.setdefault("raw_reward", list(data["rewards"]))
    data.setdefault("loss_masks", [np.ones(n, np.int8) for n in data["response_lengths"]])
    data.setdefault("rollout_mask_sums", _mask_sums(data["loss_masks"], data["rollout_ids"]))
    wrong = [
        f"{field.name} has {len(data[field.name])}"
        for field in FIELDS
        if field.per != "batch"
        and field.wire is not None
        and field.name in data
        and len(data[field.name]) != count
    ]
    if wrong:
        raise ValueError(f"{flag}: tokens has {count} entries, but {', '.join(wrong)}")
    return data
