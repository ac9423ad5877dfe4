"""Modules with a state whose heads are divided among the ranks of context parallelism
(``--context-parallel-kind ulysses``).

Each rank projects its rows, exchanges them for the rows of all ranks with its share of the heads,
mixes the tokens of these, and exchanges the result back. So it computes and stores its share of a
sample, however long that is. What mixes is the forward of transformers, on a copy of the module
that has fewer heads and gets the exchanged projections.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from slime.models.segments import PackSegments, heads_to_rows, rows_to_heads

OUTPUT = "out_proj"


@dataclass(frozen=True)
class Shares:
    """How a module with a state is divided among ranks, into heads or channels.

    Such a module has projections ``in_proj…``, what mixes tokens by heads with a depthwise
    convolution and parameters of the heads, and ``out_proj``.

    Attributes:
        counts: The attributes of the module that a rank has its share of.
        sections: For projections and convolutions of several parts that each have all heads, the
            attributes with their widths, or the product of two (``a * b``); "" for that of the input
            of ``out_proj``.
        norms: Its norms whose weights are divided. Each must have a ``group_size``: one that looks
            at all channels cannot be divided.
    """

    counts: tuple[str, ...] = ()
    sections: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    norms: tuple[str, ...] = ()


def can_divide(mixer: nn.Module, shares: Shares, pack: PackSegments) -> bool:
    """Return whether the ranks of a pack divide heads, and a module has the form that ``shares``
    describes and as many heads for each rank."""
    output = mixer._modules.get(OUTPUT)
    if pack.group is None or pack.whole is None or not isinstance(output, nn.Linear):
        return False
    if not all(hasattr(mixer._modules.get(name), "group_size") for name in shares.norms):
        return False
    counts = [output.in_features, *(vars(mixer).get(name, 1) for name in shares.counts)]
    return all(count % pack.group.size() == 0 for count in counts)


def run_by_heads(mixer: nn.Module, shares: Shares, rows: Tensor, pack: PackSegments) -> Tensor:
    """Run a module with a state on the sequences of a pack.

    Args:
        rows: ``[T, H]``, the hidden states of this rank's rows.

    Returns:
        ``[T, H]``.
    """
    group, whole, output = pack.group, pack.whole, mixer._modules[OUTPUT]
    assert group is not None and whole is not None and isinstance(output, nn.Linear)
    ranks, rank = group.size(), group.rank()

    def parts(name: str, x: Tensor, axis: int) -> tuple[Tensor, ...]:
        widths = shares.sections.get(name, ())
        sizes = [
            math.prod(vars(mixer)[attribute] for attribute in width.split(" * "))
            if width
            else output.in_features
            for width in widths
        ]
        return x.split(sizes, axis) if sizes else (x,)

    def share(name: str, x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        return torch.cat([part.chunk(ranks)[rank] for part in parts(name, x, 0)])

    # What is set here comes before the parameters and submodules that the copy shares with its
    # original.
    own: Any = copy.copy(mixer)
    made = vars(own)
    made |= {name: made[name] // ranks for name in shares.counts}
    made |= {name: share(name, x) for name, x in mixer._parameters.items()}
    made[OUTPUT] = _Instead(output.weight)
    projected = {}
    for name, part in mixer.named_children():
        if name.startswith("in_proj"):
            columns = [x.unflatten(1, (ranks, -1)) for x in parts(name, part(rows), 1)]
            projected[name] = rows_to_heads(torch.cat(columns, 2), group).squeeze(1)
        elif isinstance(part, nn.Conv1d) or name in shares.norms:
            made[name] = copy.copy(part)
            vars(made[name]).update({x: share(name, y) for x, y in part._parameters.items()})
            if isinstance(part, nn.Conv1d):
                made[name].groups //= ranks
    mixed = rows.new_zeros(ranks * len(rows), output.in_features // ranks)
    for block in whole.sequences:
        for name, columns_of_rank in projected.items():
            made[name] = _Instead(output.weight, block.gather(columns_of_rank))
        # The forward reads the sizes of its input, and the values of the projections.
        sizes = rows.new_zeros(()).expand(block.n, block.length, rows.shape[1])
        result = type(own).forward(own, hidden_states=sizes).flatten(0, 1)
        mixed = mixed.index_copy(0, block.own, result.index_select(0, block.picks).to(mixed.dtype))
    outputs: Tensor = output(heads_to_rows(mixed.unsqueeze(1), group).flatten(1))
    return outputs


class _Instead:
    """What stands for a projection: it returns ``output``, or its input. Forwards of some releases
    ask for the dtype and the device of the ``weight``."""

    def __init__(self, weight: Tensor, output: Tensor | None = None) -> None:
        self.weight = weight
        self.output = output

    def __call__(self, x: Tensor) -> Tensor:
        return x if self.output is None else self.output
