"""Convert samples of a rank batch to one pack for Megatron."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from slime.backends.megatron.model import Scoring
from slime.backends.megatron.modules import Pack
from slime.data.fields import RankBatch
from slime.data.packing import PackLayout, build_context_pack, build_pack
from slime.models.segments import PackSegments, to_device


@dataclass(frozen=True)
class MicroBatch:
    """One pack of n samples. ``indices`` are their positions in the rank batch; they are empty for a dummy.

    ``response_lengths`` and ``response_index`` (None for all tokens) describe the part of this context-parallel rank.
    """

    indices: list[int]
    ids: Tensor
    pack: Pack
    scoring: Scoring
    response_lengths: list[int]
    response_index: list[Tensor] | None
    positions: np.ndarray
    """int64 ``[T]``: the position of each row in its sample."""
    sample_rows: list[np.ndarray]
    """The rows of each sample on this rank. Samples that share a prompt share its rows."""

    @property
    def num_tokens(self) -> int:
        """The number of tokens on this rank."""
        return self.ids.shape[1]


@dataclass(frozen=True)
class PackBuilder:
    """Builds micro-batches.

    Attributes:
        context_group: The ranks that divide the tokens of each sample; None without context parallelism.
        pad_to_multiple: Pad the tokens of a rank to a multiple of this. Sequence parallelism divides them by the
            tensor-parallel size.
        share_prompts: Whether samples of a group store their prompt and other common beginnings once.
        with_sequences: Whether packs list their sequences, for layers with a state.
        chunk_size, fused: How logits are computed; see :class:`Scoring`.
    """

    device: torch.device
    context_group: ProcessGroup | None = None
    pad_to_multiple: int = 1
    share_prompts: bool = True
    with_sequences: bool = False
    chunk_size: int = -1
    fused: bool = False

    def build(self, batch: RankBatch, indices: Sequence[int], scoring: Scoring) -> MicroBatch:
        """Build the pack of the samples at ``indices``. ``scoring`` has the requested outputs; rows and targets are
        added to it."""
        indices = list(indices)
        tokens = [batch["tokens"][i].numpy() for i in indices] or [torch.zeros(2, dtype=torch.long).numpy()]
        lengths = [int(batch["response_lengths"][i]) for i in indices] or [1]
        groups = [int(batch["group_indices"][i]) for i in indices] or [0]
        layout = self._layout(tokens, lengths, groups)
        segments = PackSegments.from_layout(layout, self.device, self.context_group, self.with_sequences)
        # With context parallelism, a sample is divided among ranks in chunks, so its scored rows are listed one by one.
        index = layout.response_index
        return MicroBatch(
            indices=indices,
            ids=to_device(layout.tokens, self.device)[None],
            pack=Pack(positions=to_device(layout.positions, self.device), segments=segments),
            scoring=replace(
                scoring,
                logit_index=to_device(layout.logit_index, self.device),
                targets=to_device(layout.targets, self.device),
                chunk_size=self.chunk_size,
                fused=self.fused,
            ),
            response_lengths=layout.response_lengths,
            response_index=None if index is None else [torch.from_numpy(x) for x in index],
            positions=layout.positions,
            sample_rows=[layout.rows_of(i) for i in range(len(indices))],
        )

    def _layout(self, tokens: list[np.ndarray], lengths: list[int], groups: list[int]) -> PackLayout:
        if self.context_group is None:
            return build_pack(tokens, lengths, groups, self.share_prompts, self.pad_to_multiple)
        group = self.context_group
        return build_context_pack(tokens, lengths, group.size(), group.rank(), self.pad_to_multiple)
