"""Check that the tensors of an engine changed if and only if the sent weights changed.

SGLang reports checksums of its own fused and sharded tensors. The trainer cannot predict these for every model family
and parallel layout. But it knows which of the sent tensors changed since the last update, and from this some rules
follow that hold for every family and layout:

* A tensor of the engine must change on some rank if any tensor that goes into it changed.
* It must change on *every* rank if all tensors that go into it changed everywhere. Everywhere means in each of
  ``2 * tp`` equal parts of their rows and of their columns, and so in any part of ``1 / tp`` that a rank may have.
* It must not change if none of them changed. This rule is only applied if the targets of all changed tensors are known.
* A vector that all ranks hold as a whole must stay equal on all of them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

    from slime.engines.payload import NamedTensor

BLOCK = 1 << 23  # elements per computation, which bounds the memory: each is converted to eight bytes
_INTEGERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}
_FUSED = (
    (re.compile(r"\.(q|k|v)_proj\."), ".qkv_proj."),
    (re.compile(r"\.(gate|up)_proj\."), ".gate_up_proj."),
    (re.compile(r"\.(q_a_proj|kv_a_proj_with_mqa)\."), ".fused_qkv_a_proj_with_mqa."),
    (re.compile(r"\.experts\.\d+\.(gate|up)_proj\.weight$"), ".experts.w13_weight"),
    (re.compile(r"\.experts\.\d+\.down_proj\.weight$"), ".experts.w2_weight"),
)
_VOCABULARY = ("embed_tokens.weight", "lm_head.weight")  # with padding, a rank may hold hardly any row of the tensor


class Fingerprint(NamedTuple):
    """A fingerprint of the bits of one tensor. Different tensors have equal fingerprints with probability 2**-40.

    Attributes:
        rows, columns: One number for each of several equal parts along the first dimension, and along the others. If
            there are fewer rows or columns than requested parts, each of them is a part.
        divided: Whether the parts of a vector differ from one another. If they do, ranks with equal checksums must
            hold the whole vector.
    """

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    divided: bool = False

    def is_comparable(self, before: Fingerprint) -> bool:
        """Return whether both have the same number of parts. The number depends on the ranks of the engines."""
        return len(self.rows) == len(before.rows) and len(self.columns) == len(before.columns)

    def changed(self, before: Fingerprint) -> bool:
        return (self.rows, self.columns) != (before.rows, before.columns)

    def changed_everywhere(self, before: Fingerprint) -> bool:
        """Return whether all parts along the rows, and for a matrix along the columns, changed."""
        pairs = [*zip(self.rows, before.rows, strict=True), *zip(self.columns, before.columns, strict=True)]
        return all(now != then for now, then in pairs)


@dataclass
class Held:
    """The checksums of an engine after an update that passed the check, and the fingerprints of that update."""

    checksums: Mapping[str, str]
    sent: Mapping[str, Fingerprint]


@dataclass
class AuditMemory:
    """What a sender keeps from one update to the next.

    Attributes:
        sent: The fingerprint of the newest version of every tensor.
        held: For each engine URL, the state after its last complete update.
        updated: The URLs of the engines that got an update from this sender.
    """

    sent: dict[str, Fingerprint] = field(default_factory=dict)
    held: dict[str, Held] = field(default_factory=dict)
    updated: set[str] = field(default_factory=set)


def fingerprints(tensors: Sequence[NamedTensor], ranks: int) -> dict[str, Fingerprint]:
    """Compute fingerprints of tensors on any device, for engines with up to ``ranks`` tensor-parallel ranks."""
    groups: dict[tuple[torch.Size, torch.dtype], list[NamedTensor]] = defaultdict(list)
    for name, tensor in tensors:
        groups[tensor.shape, tensor.dtype].append((name, tensor))
    found: dict[str, Fingerprint] = {}
    for (shape, _), named in groups.items():
        many = max(BLOCK // max(shape.numel(), 1), 1)
        for start in range(0, len(named), many):
            found |= _of_one_shape(named[start : start + many], 2 * ranks)
    return found


def _of_one_shape(named: Sequence[NamedTensor], parts: int) -> dict[str, Fingerprint]:
    import torch

    first = named[0][1]
    count, rows = len(named), first.shape[0] if first.dim() else 1
    columns = first.numel() // max(rows, 1)
    integer: torch.dtype = getattr(torch, _INTEGERS[first.element_size()])
    flat = [x.detach().contiguous().view(-1).view(integer).view(rows, columns) for _, x in named]
    # Columns get other multipliers than rows. With the same ones, opposite changes at [i, j] and [j, i] would cancel.
    by_row, by_column = _multipliers(rows, first.device), _multipliers(columns, first.device, skip=2**40)
    row_part, column_part = _part_of(rows, parts, first.device), _part_of(columns, parts, first.device)
    row_sums = torch.zeros(count, min(rows, parts), dtype=torch.int64, device=first.device)
    column_sums = torch.zeros(count, min(columns, parts), dtype=torch.int64, device=first.device)
    step = max(BLOCK // max(count * columns, 1), 1)
    for start in range(0, rows, step):
        block = torch.stack([x[start : start + step] for x in flat]).to(torch.int64)
        weights = by_row[start : start + step]
        sums = (block * by_column).sum(2) * weights
        row_sums.index_add_(1, row_part[start : start + step], sums)
        sums = (block * weights[:, None]).sum(1) * by_column
        column_sums.index_add_(1, column_part, sums)
    divided = [first.dim() == 1 and _divided(x.view(-1), parts // 2) for x in flat]
    matrix = columns > 1
    each = zip(named, row_sums.tolist(), column_sums.tolist(), divided, strict=True)
    return {n: Fingerprint(tuple(r), tuple(c) if matrix else (), d) for (n, _), r, c, d in each}


def _divided(vector: torch.Tensor, ranks: int) -> bool:
    import torch

    if ranks < 2 or vector.numel() % ranks:
        return False
    first, *others = vector.chunk(ranks)
    return not all(torch.equal(first, other) for other in others)


def _multipliers(count: int, device: torch.device, skip: int = 0) -> torch.Tensor:
    """Return odd numbers, the same in every call: a multiplicative hash of the position, starting after ``skip``."""
    import torch

    position = torch.arange(skip + 1, skip + count + 1, dtype=torch.int64, device=device)
    mixed = position * 0x9E3779B97F4A7C1 ^ (position * 0x5851F42D4C957F2D >> 29)
    return (mixed * 0x2545F4914F6CDD1D ^ (mixed >> 31)) | 1


def _part_of(count: int, parts: int, device: torch.device) -> torch.Tensor:
    import torch

    return torch.arange(count, dtype=torch.int64, device=device) * min(count, parts) // max(count, 1)


# --- consequences --------------------------------------------------------------------------------


def wrong_changes(checksums: Mapping[str, str], sent: Mapping[str, Fingerprint], before: Held) -> dict[str, list[str]]:
    """Return the tensors of an engine that cannot be those that were sent, by the kind of the error.

    Args:
        checksums: The checksums of the engine now, named ``rank<i>.<name>`` if it has several ranks.
        sent: The fingerprint of the newest version of every tensor, including those that this update left out.
        before: The state of the engine after an earlier update.
    """
    now, then = _by_rank(checksums), _by_rank(before.checksums)
    known = {name for name, is_ in sent.items() if name in before.sent and is_.is_comparable(before.sent[name])}
    changed = {name for name in known if sent[name].changed(before.sent[name])}
    everywhere = {name for name in changed if sent[name].changed_everywhere(before.sent[name])}
    everywhere = {name for name in everywhere if not name.endswith(_VOCABULARY)}
    # A changed tensor whose target is unknown may have changed any tensor, so nothing can be said to be unchanged.
    hidden = any(_place(name, now) is None for name in sent if name in changed or name not in known)
    wrong: dict[str, list[str]] = defaultdict(list)
    for tensor, parts in _sources(sent, now).items():
        if now[tensor].keys() != then.get(tensor, {}).keys() or not known.issuperset(parts):
            continue  # the engine reports other tensors than before, or fingerprints to compare with are missing
        ranks = now[tensor]
        same = [rank for rank in ranks if ranks[rank] == then[tensor][rank]]
        if everywhere.issuperset(parts) and same:
            wrong["did not change with the sent weights"] += [f"{rank}{tensor}" for rank in same]
        elif changed.intersection(parts) and len(same) == len(ranks):
            wrong["did not change with the sent weights"].append(tensor)
        elif not hidden and not changed.intersection(parts) and len(same) < len(ranks):
            wrong["changed, although the sent weights did not"] += [f"{r}{tensor}" for r in ranks if r not in same]
        elif _whole_on_every_rank(tensor, then[tensor], before.sent) and len(set(ranks.values())) > 1:
            wrong["differ between ranks that must have the same tensor"].append(tensor)
    return dict(wrong)


def unmatched(checksums: Mapping[str, str], sent: Iterable[str]) -> list[str]:
    """Return the sent tensors for which the tensor of the engine is not known, so that they cannot be checked."""
    known = _by_rank(checksums)
    return [name for name in sent if _place(name, known) is None]


def _sources(sent: Iterable[str], held: Mapping[str, object]) -> dict[str, list[str]]:
    """Return for each tensor of the engine the sent tensors that go into it."""
    sources: dict[str, list[str]] = defaultdict(list)
    for name in sent:
        place = _place(name, held)
        if place is not None:
            sources[place].append(name)
    return sources


def _place(name: str, held: Mapping[str, object]) -> str | None:
    """Return the tensor of the engine into which a sent tensor goes, or None if it is not known."""
    for pattern, fused in _FUSED:
        candidate = pattern.sub(fused, name)
        if candidate != name and candidate in held:
            return candidate
    return name if name in held else None


def _whole_on_every_rank(tensor: str, then: Mapping[str, str], sent: Mapping[str, Fingerprint]) -> bool:
    return len(then) > 1 and len(set(then.values())) == 1 and tensor in sent and sent[tensor].divided


def _by_rank(checksums: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return for each tensor its checksum by rank (``rank1.``; the empty string if the engine has one rank)."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for name, value in checksums.items():
        match = re.match(r"rank\d+\.", name)
        rank = match.group() if match else ""
        found[name.removeprefix(rank)][rank] = value
    return found
