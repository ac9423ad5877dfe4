"""Modules with a state whose heads are divided among the ranks of context parallelism
(``--context-parallel-kind ulysses``).

Each rank projects its rows, exchanges them for the rows of all ranks with its share of the heads,
mixes the tokens of these, and exchanges the result back. So it computes and stores its share of a
sample, however long that is. What mixes is the forward of transformers, on a copy of the module
that has fewer heads and gets the exchanged projections.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from slime.models.layer_kinds import Shares
from slime.models.segments import PackSegments, heads_to_rows, rows_to_heads

OUTPUT = "out_proj"


def can_divide(mixer: nn.Module, shares: Shares, ranks: int) -> bool:
    """Return whether a module has the form that ``shares`` describes, and as many heads for each
    rank."""
    output = mixer._modules.get(OUTPUT)
    if not isinstance(output, nn.Linear) or output.in_features % ranks:
        return False
    return all(vars(mixer).get(name, 1) % ranks == 0 for name in shares.counts)


def run_by_heads(mixer: nn.Module, shares: Shares, rows: Tensor, pack: PackSegments) -> Tensor:
    """Run a module with a state on the sequences of a pack.

    Args:
        rows: ``[T, H]``, the hidden states of this rank's rows.

    Returns:
        ``[T, H]``.
    """
    group, whole = pack.group, pack.whole
    assert group is not None and whole is not None
    ranks, rank = group.size(), group.rank()
    own = _copy(mixer)
    for name in shares.counts:
        vars(own)[name] //= ranks
    own._parameters = {name: _share(x, (), ranks, rank) for name, x in mixer._parameters.items()}
    projected = {}
    for name, part in mixer.named_children():
        sections = shares.sections(mixer, name)
        if name.startswith("in_proj"):
            columns = [x.unflatten(1, (ranks, -1)) for x in _split(part(rows), sections, 1)]
            projected[name] = rows_to_heads(torch.cat(columns, 2), group).squeeze(1)
        elif isinstance(part, nn.Conv1d):
            own._modules[name] = _fewer_channels(part, sections, ranks, rank)
    own._modules[OUTPUT] = nn.Identity()
    output = mixer._modules[OUTPUT]
    assert isinstance(output, nn.Linear)
    mixed = rows.new_zeros(ranks * len(rows), output.in_features // ranks)
    for block in whole.sequences:
        for name, columns_of_rank in projected.items():
            own._modules[name] = _Given(block.gather(columns_of_rank))
        # The forward reads the sizes of its input, and the values of the projections.
        sizes = rows.new_zeros(()).expand(block.n, block.length, rows.shape[1])
        result = type(mixer).forward(own, hidden_states=sizes)
        picked = result.flatten(0, 1).index_select(0, block.picks)
        mixed = mixed.index_copy(0, block.own, picked.to(mixed.dtype))
    outputs: Tensor = output(heads_to_rows(mixed.unsqueeze(1), group).flatten(1))
    return outputs


class _Given(nn.Module):
    """A projection whose output is known."""

    def __init__(self, output: Tensor) -> None:
        super().__init__()
        self.output = output

    def forward(self, hidden: Tensor) -> Tensor:
        return self.output


def _copy(module: nn.Module) -> nn.Module:
    """Copy a module such that the entries of the copy can be changed."""
    made = copy.copy(module)
    made._modules, made._parameters = dict(module._modules), dict(module._parameters)
    return made


def _split(x: Tensor, sections: Sequence[int], axis: int) -> Sequence[Tensor]:
    return x.split(list(sections), axis) if sections else (x,)


def _share(x: Tensor | None, sections: Sequence[int], ranks: int, rank: int) -> nn.Parameter | None:
    """Return a rank's share of a parameter of all heads."""
    if x is None:
        return None
    share = torch.cat([part.chunk(ranks)[rank] for part in _split(x, sections, 0)])
    return share  # type: ignore[return-value]  # with a gradient, which no parameter of a copy has


def _fewer_channels(
    convolution: nn.Conv1d, sections: Sequence[int], ranks: int, rank: int
) -> nn.Module:
    made = _copy(convolution)
    made._parameters = {
        name: _share(x, sections, ranks, rank) for name, x in convolution._parameters.items()
    }
    vars(made)["groups"] //= ranks
    return made
