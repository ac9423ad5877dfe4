"""Divergences between the distributions of a student and a teacher at each token.

Sources: Agarwal et al., "On-Policy Distillation of Language Models: Learning from Self-Generated
Mistakes" (2024), for both KLs and the Jensen-Shannon divergence of the whole vocabulary. The top k
with all other tokens as one is that of SDPO (arXiv 2601.20802).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def divergence(student: Tensor, teacher: Tensor, kind: str) -> Tensor:
    """Return the divergence of two distributions, ``[R, V] -> [R]``, never negative.

    ``reverse_kl``: Σ_v s (log s − log t). ``forward_kl``: Σ_v t (log t − log s). ``jsd``: ½ KL(s ‖ m)
    + ½ KL(t ‖ m) with m = (s + t) / 2.

    Args:
        student, teacher: Log-probs, which are finite.
        kind: One of ``config.DIVERGENCES``.
    """
    if kind == "reverse_kl":
        return (student.exp() * (student - teacher)).sum(-1)
    if kind == "forward_kl":
        return (teacher.exp() * (teacher - student)).sum(-1)
    import torch

    middle = torch.logaddexp(student, teacher) - math.log(2)
    return (
        divergence(student, middle, "reverse_kl") + divergence(teacher, middle, "reverse_kl")
    ) / 2


def coarse(log_probs: Tensor, kept: Tensor) -> Tensor:
    """Return the log-probs of some tokens and, last, of all others together, ``[R, k + 1]``.

    Args:
        log_probs: ``[R, V]``.
        kept: int64 ``[R, k]`` with k < V, the ids of the tokens.
    """
    import torch

    rest = log_probs.scatter(-1, kept, -math.inf).logsumexp(-1, keepdim=True)
    return torch.cat([log_probs.gather(-1, kept), rest], dim=-1)


def distilled_from_top(student: Tensor, ids: Tensor, log_probs: Tensor, kind: str) -> Tensor:
    """Return the divergence at each token, ``[R]``, where only the teacher's k likeliest are known: of
    these and of all others as one.

    Args:
        student: Logits ``[R, V]``.
        ids: int64 ``[R, k]``.
        log_probs: The teacher's log-probs of them, ``[R, k]``.
    """
    import torch

    # The others have at least the probability that is lost to rounding in float32.
    rest = (1 - log_probs.exp().sum(-1, keepdim=True)).clamp(min=1e-6).log()
    ours = coarse(student.log_softmax(-1), ids)
    return divergence(ours, torch.cat([log_probs, rest], dim=-1).to(ours.dtype), kind)


def distilled(student: Tensor, teacher: Tensor, kind: str, top_k: int = 0) -> Tensor:
    """Return the divergence at each token, ``[R]``, with gradient to the student's logits.

    With ``top_k``, it is that of the k likeliest tokens and all others as one: at most that of the
    whole vocabulary. The likeliest are the teacher's for ``forward_kl``, and the student's otherwise,
    because these weigh most in the sum.

    Args:
        student, teacher: Logits ``[R, V]`` of the same tokens. Where one has more columns, such as
            rows that pad the embedding, they are left out.
    """
    width = min(student.shape[-1], teacher.shape[-1])
    ours = student[..., :width].log_softmax(-1)
    theirs = teacher[..., :width].to(ours.dtype).log_softmax(-1)
    if 0 < top_k < width:
        chooser = theirs if kind == "forward_kl" else ours.detach()
        kept = chooser.topk(top_k, dim=-1).indices
        ours = coarse(ours, kept)
        theirs = coarse(theirs, kept)
    return divergence(ours, theirs, kind)
