"""Convert samples of a rank batch to the inputs of a Hugging Face model: one pack, or a padded
batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from slime.data.fields import RankBatch
from slime.data.packing import (
    PackLayout,
    build_context_pack,
    build_pack,
    distinct_scores,
    rows_of_rank,
)
from slime.models.loading import ModelError
from slime.models.masked_attention import image_blocks_of, images_see_ahead
from slime.models.segments import PackSegments, to_device
from slime.models.token_log_probs import Nuclei

Multimodal = Mapping[str, object] | None
"""The tensors that the processor made for one sample, by the parameter names of the model's
forward.
"""


class Distinct(NamedTuple):
    """The response tokens of a pack without those that an earlier sample of the pack has scored
    already.

    Attributes:
        logit_index, targets: int64 ``[U]``, as in :class:`ModelInputs`.
        place: int64 ``[R]``, for each response token its position among them.
    """

    logit_index: Tensor
    targets: Tensor
    place: Tensor


@dataclass(frozen=True)
class ModelInputs:
    """One micro-batch.

    Attributes:
        kwargs: Arguments of the backbone's forward; ``input_ids`` is ``[1, T]`` (packed) or ``[n,
            L]`` (padded).
        logit_index: int64 ``[R]``, the row of the flattened ``[B * L]`` outputs that scores each
            response token.
        targets: int64 ``[R]``, the response tokens of all samples, in the order of the samples.
        response_lengths: The response length of each sample; their sum is R.
        nuclei: The tokens from which each response token was sampled, if the engine reported them.
        response_index: With context parallelism, the response tokens of each sample that this rank
            has; else None.
        distinct: What to score where many samples have response tokens in common; None: all
            response tokens.
        sample_rows: For each sample, rows of the flattened inputs, int64 ``[n]``, and the positions
            in the sample of the tokens that they hold.
    """

    kwargs: dict[str, object]
    logit_index: Tensor
    targets: Tensor
    response_lengths: list[int]
    nuclei: Nuclei | None = None
    response_index: list[Tensor] | None = None
    distinct: Distinct | None = None
    sample_rows: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)


@dataclass(frozen=True)
class InputBuilder:
    """Builds the micro-batches of one model.

    Attributes:
        backbone: The model. It computes multimodal rotary positions if it has ``get_rope_index``.
        packed: Whether to put all samples into one row without padding between them (this needs
            packed attention). Otherwise the batch is padded.
        share_prompts: Whether samples of a group store their prompt and other common beginnings
            once. Only if packed.
        pad_to_multiple: Pad the length of a pack to a multiple of this, so that kernels see fewer
            shapes.
        float_dtype: The dtype of floating-point multimodal inputs.
        context_group: The ranks that divide the tokens of each sample; None without context
            parallelism. Only if packed.
        by_heads: Whether these ranks exchange tokens for heads in attention, instead of gathering
            keys and values.
        stateful: Whether layers of the model have a state, so that packs list their sequences. Only
            if packed.
        longest: The maximum length of a sample, if a longer one would change the rotary frequencies
            of others.
    """

    backbone: nn.Module
    device: torch.device
    packed: bool = True
    share_prompts: bool = True
    pad_to_multiple: int = 1
    float_dtype: torch.dtype = torch.float32
    context_group: ProcessGroup | None = None
    by_heads: bool = False
    stateful: bool = False
    longest: int | None = None

    def from_batch(self, batch: RankBatch, indices: Sequence[int]) -> ModelInputs:
        """Build the micro-batch of the samples of a rank batch at ``indices``, in that order."""
        multimodal = batch.get("multimodal_train_inputs")
        inputs = self.build(
            [torch.as_tensor(batch["tokens"][i]) for i in indices],
            [int(batch["response_lengths"][i]) for i in indices],
            [int(batch["group_indices"][i]) for i in indices],
            [multimodal[i] for i in indices] if multimodal is not None else [None] * len(indices),
        )
        nuclei = self._nuclei(batch, indices)
        # Each sample has drawn a token from a nucleus of its own.
        return inputs if nuclei is None else replace(inputs, nuclei=nuclei, distinct=None)

    def _nuclei(self, batch: RankBatch, indices: Sequence[int]) -> Nuclei | None:
        if batch.get("rollout_top_p_token_offsets") is None:
            return None
        if self.context_group is not None:
            raise ModelError(
                "--rollout-top-p below 1 cannot be used with --context-parallel-size: use one of "
                "them"
            )
        ids = torch.cat([torch.as_tensor(batch["rollout_top_p_token_ids"][i]) for i in indices])
        offsets = [0]
        for i in indices:
            own = torch.as_tensor(batch["rollout_top_p_token_offsets"][i]).tolist()
            # Each sample counts its offsets from its own beginning; in a pack they continue where
            # the sample before ended.
            offsets += [offsets[-1] - own[0] + end for end in own[1:]]
        return Nuclei(ids.long().to(self.device, non_blocking=True), offsets)

    def build(
        self,
        tokens: Sequence[Tensor],
        response_lengths: Sequence[int],
        groups: Sequence[int],
        multimodal: Sequence[Multimodal],
    ) -> ModelInputs:
        """Build one micro-batch of n samples. ``tokens`` are int64 ``[total_length]`` on the
        CPU.
        """
        if self.longest is not None and max(map(len, tokens)) > self.longest:
            raise ModelError(
                f"a sample has {max(map(len, tokens))} tokens. Above {self.longest}, the rotary "
                "frequencies of this model (longrope or dynamic in config.json) would change for "
                "all samples that are computed with it: use --rollout-max-context-len "
                f"{self.longest}, or leave longer rows out of SFT data"
            )
        if self.packed:
            inputs = self._packed(tokens, response_lengths, groups, multimodal)
        else:
            inputs = self._padded(tokens, response_lengths, multimodal)
        inputs.kwargs.update(self._media(multimodal), use_cache=False)
        return inputs

    def _packed(
        self,
        tokens: Sequence[Tensor],
        response_lengths: Sequence[int],
        groups: Sequence[int],
        multimodal: Sequence[Multimodal],
    ) -> ModelInputs:
        # Media belong to the placeholder tokens of one sample, so a sample with media shares its
        # prompt with none.
        keys = [
            ("own", i) if media else ("group", g)
            for i, (g, media) in enumerate(zip(groups, multimodal, strict=True))
        ]
        arrays = [t.numpy() for t in tokens]
        if self.context_group is not None:
            if any(multimodal):
                raise ModelError(
                    "--context-parallel-size above 1 does not support images or other media: use 1"
                )
            return self._context_packed(arrays, response_lengths, keys, self.context_group)
        layout = build_pack(
            arrays, response_lengths, keys, self.share_prompts, self.pad_to_multiple
        )
        kwargs: dict[str, Any] = {
            "input_ids": self._move(layout.tokens)[None],
            "position_ids": self._move(layout.positions)[None],
            "slime_pack": PackSegments.from_layout(
                layout, self.device, with_sequences=self.stateful
            ),
        }
        # Rotary positions of media have three axes and begin anew in each sample, so they are
        # computed for each sample alone and put into its rows of the pack.
        if any(multimodal):
            types = kwargs["mm_token_type_ids"] = self._token_types(kwargs["input_ids"])
            if images_see_ahead(self.backbone):
                blocks = image_blocks_of(types[0] == 1, self._move(np.asarray(layout.q_starts)))
                kwargs["slime_pack"] = replace(kwargs["slime_pack"], image_blocks=blocks)
                del kwargs["mm_token_type_ids"]
            positions = kwargs["position_ids"].expand(3, -1).clone()
            for i, media in enumerate(multimodal):
                rotary = self._rotary_positions(tokens[i], media)
                if rotary is not None:
                    positions[:, self._move(layout.rows_of(i))] = rotary
            if self._has_rotary_index():
                kwargs["position_ids"] = positions[:, None]
        return self._scored(layout, kwargs)

    def _context_packed(
        self,
        arrays: list[np.ndarray],
        response_lengths: Sequence[int],
        keys: Sequence[Hashable],
        group: ProcessGroup,
    ) -> ModelInputs:
        size, multiple = group.size(), self.pad_to_multiple
        if self.by_heads:
            pack = build_pack(arrays, response_lengths, keys, self.share_prompts, multiple * size)
            layout = rows_of_rank(pack, size, group.rank())
            whole = PackSegments.from_layout(pack, self.device, with_sequences=self.stateful)
        else:
            layout = build_context_pack(arrays, response_lengths, size, group.rank(), multiple)
            whole = None
        segments = PackSegments.from_layout(
            layout, self.device, group, with_sequences=self.stateful, deal_sequences=True
        )
        kwargs: dict[str, Any] = {
            "input_ids": self._move(layout.tokens)[None],
            "position_ids": self._move(layout.positions)[None],
            "slime_pack": replace(segments, whole=whole),
        }
        index = [torch.from_numpy(x) for x in layout.response_index or []]
        return replace(self._scored(layout, kwargs), response_index=index)

    def _scored(self, layout: PackLayout, kwargs: dict[str, object]) -> ModelInputs:
        distinct = distinct_scores(layout)
        return ModelInputs(
            kwargs,
            self._move(layout.logit_index),
            self._move(layout.targets),
            layout.response_lengths,
            distinct=None if distinct is None else Distinct(*map(self._move, distinct)),
            sample_rows=_sample_rows(layout),
        )

    def _padded(
        self,
        tokens: Sequence[Tensor],
        response_lengths: Sequence[int],
        multimodal: Sequence[Multimodal],
    ) -> ModelInputs:
        lengths = [len(t) for t in tokens]
        width = max(lengths)
        ids = torch.zeros(len(tokens), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        index = []
        targets = []
        # Samples are padded at the right, so positions need no shift, and the row before a token
        # scores it.
        for row, (sample, response) in enumerate(zip(tokens, response_lengths, strict=True)):
            total = len(sample)
            ids[row, :total] = sample
            mask[row, :total] = 1
            index.append(np.arange(total - response - 1, total - 1) + row * width)
            targets.append(sample[total - response :].numpy())
        positions = torch.arange(width).expand(len(tokens), -1).contiguous()
        kwargs: dict[str, Any] = {
            "input_ids": ids.to(self.device),
            "attention_mask": mask.to(self.device),
        }
        kwargs["position_ids"] = positions.to(self.device)
        if any(multimodal):
            ahead = images_see_ahead(self.backbone)
            name = "token_type_ids" if ahead else "mm_token_type_ids"
            kwargs[name] = self._token_types(kwargs["input_ids"])
            if self._has_rotary_index():
                rotary = positions.expand(3, -1, -1).clone().to(self.device)
                for row, media in enumerate(multimodal):
                    own = self._rotary_positions(tokens[row], media)
                    if own is not None:
                        rotary[:, row, : lengths[row]] = own
                kwargs["position_ids"] = rotary
        responses = list(map(int, response_lengths))
        return ModelInputs(
            kwargs,
            self._move(np.concatenate(index)),
            self._move(np.concatenate(targets)),
            responses,
            sample_rows=[
                (np.arange(total) + row * width, np.arange(total))
                for row, total in enumerate(lengths)
            ],
        )

    def _media(self, multimodal: Sequence[Multimodal]) -> dict[str, Tensor]:
        """Concatenate the media tensors (pixel values, grids and so on) of all samples."""
        merged: dict[str, list[Tensor]] = {}
        for media in multimodal:
            for key, value in (media or {}).items():
                if key not in (
                    "input_ids",
                    "attention_mask",
                    "position_ids",
                    "mm_token_type_ids",
                    "token_type_ids",
                ):
                    merged.setdefault(key, []).append(torch.as_tensor(value))
        return {key: self._device(torch.cat(values)) for key, values in merged.items()}

    def _device(self, x: Tensor) -> Tensor:
        return x.to(
            self.device, self.float_dtype if x.is_floating_point() else x.dtype, non_blocking=True
        )

    def _token_types(self, ids: Tensor) -> Tensor:
        """Return the type of each token, as the processors of transformers do: 0 text, 1 image, 2
        video.
        """
        config: Any = self.backbone.config
        types = torch.zeros_like(ids)
        for kind, name in ((1, "image_token_id"), (2, "video_token_id")):
            token = getattr(config, name, None)
            if token is not None:
                types[ids == token] = kind
        return types

    def _has_rotary_index(self) -> bool:
        return hasattr(self.backbone, "get_rope_index")

    def _rotary_positions(self, tokens: Tensor, media: Multimodal) -> Tensor | None:
        """Return the rotary positions (time, height, width) of one sample, ``[3, total_length]``.

        None if the model has no such positions or the sample no media.
        """
        if not media or not self._has_rotary_index():
            return None
        function: Any = self.backbone.get_rope_index
        ids = tokens[None].to(self.device)
        known = inspect.signature(function).parameters
        given = {"input_ids": ids, "mm_token_type_ids": self._token_types(ids)}
        given |= {
            k: torch.as_tensor(v).to(self.device)
            for k, v in media.items()
            if k in known and k not in given
        }
        given.pop("attention_mask", None)
        return function(**{k: v for k, v in given.items() if k in known})[0][:, 0]

    def _move(self, array: np.ndarray) -> Tensor:
        return to_device(array, self.device)


def _sample_rows(layout: PackLayout) -> list[tuple[np.ndarray, np.ndarray]]:
    rows = map(layout.rows_of, range(len(layout.sample_ranges)))
    return [(mine, layout.positions[mine]) for mine in rows]
