"""Log-probability and entropy of given tokens from hidden states, one chunk of logits at a time.

With z = logits / temperature, p = softmax(z) and target t:

    log_prob = z_t − logsumexp(z)              d log_prob / dz_j = 1[j = t] − p_j
    entropy  = logsumexp(z) − Σ_j p_j z_j      d entropy / dz_j  = −p_j (z_j − Σ_k p_k z_k)

Softmax and sums are computed in float32, whatever the model's dtype is. Forward keeps the logits of
the last chunk only, and backward recomputes the others, so at most one chunk of logits is in memory
at any time. On an accelerator a chunk that is trained is large enough for most micro-batches, so
that nothing is recomputed.

Without an entropy gradient, backward never forms dz: with c = grad / temperature

    d hidden = c · (W[t] − p W)        d W[t] += c · hidden,   d W −= pᵀ (c · hidden)

On the CPU, a chunk is processed in blocks of rows that fit the cache. On an accelerator,
torch.compile fuses the passes over a chunk (``fused``): its logits stay in the model's dtype, are
read once or twice, and are overwritten by their gradient.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from slime.models.autograd import Context, Gradients
from slime.models.cpu_kernels import matmul_nt

CHUNK_BYTES = 256 * 1024 * 1024
FUSED_CHUNK_BYTES = 1024 * 1024 * 1024
KEPT_BYTES = 4 * FUSED_CHUNK_BYTES
CACHE_BYTES = 4 * 1024 * 1024
TILE_ROWS = 128


class TokenScores(NamedTuple):
    """Scores of tokens, float32 ``[R]``. The entropy is None if it was not requested."""

    log_probs: Tensor
    entropy: Tensor | None


class Kernels(NamedTuple):
    """How tokens of a model are scored after a part of the kind ``kernels`` has exchanged those of
    its layers."""

    token_log_probs: Callable[..., TokenScores]
    """As :func:`token_log_probs`."""
    score: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]
    """From logits ``[r, vocab]``, targets ``[r]`` and temperatures ``[r]`` the log-probs ``[r]`` of
    the targets first."""


class Nuclei(NamedTuple):
    """The tokens from which each row was sampled (top-p, top-k). Its log-prob is normalized over
    these tokens only.
    """

    ids: Tensor
    """int64 ``[offsets[-1]]``, row after row."""
    offsets: list[int]
    """``[R + 1]``. A row without tokens is not restricted."""


class ScoreOptions(NamedTuple):
    """How :func:`token_log_probs` is computed; see its arguments."""

    inverse_temperature: float
    chunk_size: int
    with_entropy: bool
    entropy_grad: bool
    nuclei: Nuclei | None


def default_chunk_size(vocab_size: int) -> int:
    """Rows per chunk so that its float32 logits take about 256 MiB."""
    return max(CHUNK_BYTES // (4 * vocab_size), 64)


def fused_chunk_size(vocab_size: int, element_size: int, kept: bool = False) -> int:
    """Rows per chunk so that its logits take about 1 GiB: whole tiles of a matrix product, large
    enough for it.

    Logits that are ``kept`` for a backward pass may take 4 GiB: each chunk after the first costs
    another product with the output embedding, and another sum of the gradients of that embedding. A
    chunk has fewer than 2³¹ elements.
    """
    rows = (KEPT_BYTES if kept else FUSED_CHUNK_BYTES) // (element_size * vocab_size)
    return max(rows // TILE_ROWS, 1) * TILE_ROWS


def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    *,
    bias: Tensor | None = None,
    chunk_size: int = -1,
    with_entropy: bool = False,
    entropy_grad: bool = False,
    fused: bool = False,
    nuclei: Nuclei | None = None,
) -> TokenScores:
    """Score ``targets`` under ``softmax((hidden @ weight.T + bias) / temperature)``.

    Args:
        hidden: ``[R, H]``, only the rows that score a token.
        weight: ``[V, H]``, the output embedding; bias: ``[V]`` or None.
        targets: int64 ``[R]``.
        chunk_size: Number of rows whose logits are computed at a time; -1 for about 256 MiB of
            logits (fused: 1 GiB, or 4 GiB with a gradient).
        with_entropy: Also return the entropy. With ``entropy_grad`` it has a gradient.
        fused: Compile the operations on a chunk of logits; for accelerators.
        nuclei: Restrict the softmax of the log-probs, but not that of the entropy, to these tokens.
    """
    scale = 1.0 / temperature
    vocab = weight.shape[0]
    compiles = fused and nuclei is None
    kept = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    default = (
        fused_chunk_size(vocab, weight.element_size(), kept)
        if compiles
        else default_chunk_size(vocab)
    )
    size = chunk_size if chunk_size > 0 else default
    if nuclei is not None:
        options = ScoreOptions(scale, size, False, False, nuclei)
        log_probs, _ = _TokenScores.apply(hidden, weight, bias, targets, options)
        if not with_entropy:
            return TokenScores(log_probs, None)
        whole = token_log_probs(hidden, weight, targets, temperature, bias=bias, chunk_size=chunk_size,
                                with_entropy=True, entropy_grad=entropy_grad, fused=fused)  # fmt: skip
        return TokenScores(log_probs, whole.entropy)
    function = FusedTokenScores if fused else _TokenScores
    options = ScoreOptions(scale, size, with_entropy, entropy_grad, None)
    log_probs, entropy = function.apply(hidden, weight, bias, targets, options)
    if not with_entropy:
        return TokenScores(log_probs, None)
    return TokenScores(log_probs, entropy if entropy_grad else entropy.detach())


class _TokenScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        options: ScoreOptions,
    ) -> tuple[Tensor, Tensor]:
        inverse_temperature, chunk_size, with_entropy, entropy_grad, nuclei = options
        rows = hidden.shape[0]
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        log_probs = torch.empty(rows, dtype=dtype, device=hidden.device)
        log_sums = torch.empty_like(log_probs)
        entropy = torch.empty_like(log_probs)
        keep = any(ctx.needs_input_grad[:3])
        kept: Tensor | None = None
        for start in range(0, rows, chunk_size):
            part = slice(start, start + chunk_size)
            z = _scaled_logits(hidden[part], weight, bias, inverse_temperature, dtype)
            if nuclei is not None:
                _restrict(z, targets[part], nuclei, start)
            # Backward goes over the chunks from the last to the first, so the last one is kept for
            # it, which saves one product. Rows that fit one chunk recompute nothing.
            last = keep and part.stop >= rows
            for block in _blocks(z):
                here = slice(start + block.start, start + block.start + z[block].shape[0])
                # The gradient of the log-prob needs only p, and that of the entropy needs z as
                # well.
                probabilities_stay = last and not entropy_grad
                scores = _score_rows(z[block], targets[here], with_entropy, probabilities_stay)
                log_probs[here], log_sums[here] = scores[:2]
                if scores[2] is not None:
                    entropy[here] = scores[2]
            kept = z if last else None
        ctx.save_for_backward(hidden, weight, bias, targets, log_sums, entropy, kept)
        ctx.settings = options
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> Gradients:
        hidden, weight, bias, targets, log_sums, entropy, kept = ctx.saved_tensors
        inverse_temperature, chunk_size, _, entropy_grad, nuclei = ctx.settings
        chunks = _ChunkGradients(hidden, weight, bias, ctx.needs_input_grad[:3])
        last = (max(hidden.shape[0] - 1, 0) // chunk_size) * chunk_size
        for start in range(last, -1, -chunk_size):
            part = slice(start, start + chunk_size)
            # the last chunk comes first; p if there is no entropy gradient, else z
            z, kept = kept, None
            if z is None:
                z = _scaled_logits(hidden[part], weight, bias, inverse_temperature, log_sums.dtype)
                if nuclei is not None:
                    _restrict(z, targets[part], nuclei, start)
                if not entropy_grad:
                    for block in _blocks(z):
                        # The stored log-sum-exp makes p of recomputed logits exact without another
                        # reduction over the vocabulary.
                        z[block].sub_(log_sums[part][block, None]).exp_()
            if entropy_grad:
                rows = [x[part, None] for x in (targets, log_sums, grads[0], grads[1], entropy)]
                chunks.add_logit_gradient(part, _logit_gradient(z, *rows).mul_(inverse_temperature))
            else:
                chunks.add(part, z, targets[part], grads[0][part, None] * inverse_temperature)
        return chunks.hidden, chunks.weight, chunks.bias, None, None


class FusedTokenScores(torch.autograd.Function):
    """As :class:`_TokenScores`, but the operations on a chunk are compiled to one kernel in forward
    and in backward.
    """

    @staticmethod
    def forward(
        ctx: Context,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        options: ScoreOptions,
    ) -> tuple[Tensor, Tensor]:
        inverse_temperature, chunk_size, with_entropy = options[:3]
        log_probs = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        log_sums = torch.empty_like(log_probs)
        entropy = torch.empty_like(log_probs)
        kept: Tensor | None = None
        for start in range(0, hidden.shape[0], chunk_size):
            part = slice(start, start + chunk_size)
            kept = F.linear(hidden[part], weight, bias)
            scores = compiled(fused_scores)(kept, targets[part], inverse_temperature, with_entropy)
            log_probs[part], log_sums[part] = scores[:2]
            if scores[2] is not None:
                entropy[part] = scores[2]
        kept = kept if any(ctx.needs_input_grad[:3]) else None
        ctx.save_for_backward(hidden, weight, bias, targets, log_sums, entropy, kept)
        ctx.settings = options
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> Gradients:
        hidden, weight, bias, targets, log_sums, entropy, kept = ctx.saved_tensors
        inverse_temperature, chunk_size, _, entropy_grad, _ = ctx.settings
        chunks = _ChunkGradients(hidden, weight, bias, ctx.needs_input_grad[:3])
        last = (max(hidden.shape[0] - 1, 0) // chunk_size) * chunk_size
        for start in range(last, -1, -chunk_size):
            part = slice(start, start + chunk_size)
            logits, kept = kept, None  # the last chunk comes first
            if logits is None:
                logits = F.linear(hidden[part], weight, bias)
            of_entropy = (grads[1][part], entropy[part]) if entropy_grad else None
            compiled(gradient_in_place)(
                logits,
                targets[part],
                log_sums[part],
                grads[0][part],
                inverse_temperature,
                of_entropy,
            )
            chunks.add_logit_gradient(part, logits)
        return chunks.hidden, chunks.weight, chunks.bias, None, None


@functools.cache
def compiled(function: Callable[..., object]) -> Callable[..., Any]:
    """Compile a function, once per process."""
    return torch.compile(function)


def fused_scores(
    logits: Tensor, targets: Tensor, inverse_temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return log_prob, logsumexp and entropy, float32 ``[r]``, of rows of logits ``[r, V]``;
    ``targets`` is int64 ``[r]``."""
    z = logits.float() * inverse_temperature
    log_sum = z.logsumexp(-1)
    log_prob = z.gather(-1, targets[:, None]).squeeze(-1) - log_sum
    if not with_entropy:
        return log_prob, log_sum, None
    return log_prob, log_sum, log_sum - ((z - log_sum[:, None]).exp() * z).sum(-1)


def fused_gradient(
    logits: Tensor,
    targets: Tensor,
    log_sums: Tensor,
    grad: Tensor,
    inverse_temperature: float,
    of_entropy: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Return the gradient with respect to the logits ``[r, V]``, in their dtype.

    Args:
        log_sums, grad: The logsumexp of each row, and the gradient of its log-prob, float32
            ``[r]``.
        of_entropy: The gradient of the entropy, and the entropy; None if it has no gradient.
    """
    log_p = logits.float() * inverse_temperature - log_sums[:, None]
    p = log_p.exp()
    dz = -grad[:, None] * p
    if of_entropy is not None:
        dz = dz - of_entropy[0][:, None] * p * (log_p + of_entropy[1][:, None])
    # A comparison instead of a scatter: it fuses into the kernel that writes dz, where a scatter
    # would read and write the whole chunk once more.
    hit = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    return (torch.where(hit, dz + grad[:, None], dz) * inverse_temperature).to(logits.dtype)


def gradient_in_place(
    logits: Tensor,
    targets: Tensor,
    log_sums: Tensor,
    grad: Tensor,
    inverse_temperature: float,
    of_entropy: tuple[Tensor, Tensor] | None,
) -> None:
    """Overwrite the logits by :func:`fused_gradient`, which takes no memory for a second chunk."""
    logits.copy_(fused_gradient(logits, targets, log_sums, grad, inverse_temperature, of_entropy))


class _ChunkGradients:
    """Sums the gradients of hidden, weight and bias over chunks. A gradient that is not needed is
    None.
    """

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, needed: tuple[bool, ...]
    ) -> None:
        self.inputs = hidden, weight
        self.dtype = torch.promote_types(weight.dtype, torch.float32)
        self.hidden = torch.empty_like(hidden) if needed[0] else None
        self.needs_weight = needed[1]
        self._weight: Tensor | None = None
        self.bias = torch.zeros_like(bias) if bias is not None and needed[2] else None

    @property
    def weight(self) -> Tensor | None:
        return None if self._weight is None else self._weight.to(self.inputs[1].dtype)

    def add_logit_gradient(self, part: slice, dz: Tensor) -> None:
        """Add the gradients that follow from ``dz [r, V]``, the gradient of the logits."""
        hidden, weight = self.inputs
        if self.bias is not None:
            self.bias += dz.sum(0).to(self.bias.dtype)
        dz = dz.to(hidden.dtype)
        if self.hidden is not None:
            self.hidden[part] = matmul_nt(dz, weight.t())
        if self.needs_weight:
            self._add_weight(matmul_nt(dz.t(), hidden[part].t()))

    def add(self, part: slice, p: Tensor, targets: Tensor, c: Tensor) -> None:
        """Add the gradients for targets ``[r]``, given probabilities ``p [r, V]`` (overwritten) and
        coefficients ``c [r, 1]``; see the formula without an entropy gradient in the module."""
        hidden, weight = self.inputs
        if hidden.dtype != p.dtype or self.bias is not None:
            # With bfloat16, 1 − p must be computed before the result is rounded.
            self.add_logit_gradient(part, p.mul_(-c).scatter_add_(-1, targets[:, None], c))
            return
        if self.hidden is not None:
            self.hidden[part] = (
                matmul_nt(p, weight.t()).neg_().add_(weight.index_select(0, targets)).mul_(c)
            )
        if self.needs_weight:
            scaled = hidden[part] * c
            product = matmul_nt(p.t(), scaled.neg().t())
            self._add_weight(product.index_add_(0, targets, scaled))

    def _add_weight(self, product: Tensor) -> None:
        # The products of chunks may be bfloat16, and are summed in float32.
        self._weight = (
            product if self._weight is None else self._weight.to(self.dtype).add_(product)
        )


def _blocks(z: Tensor) -> list[slice]:
    """Divide the rows of a chunk into blocks that fit the cache of a CPU; on an accelerator there
    is one block.
    """
    rows = (
        max(z.shape[0], 1)
        if z.device.type != "cpu"
        else max(CACHE_BYTES // (z.shape[1] * z.element_size()), 1)
    )
    return [slice(i, min(i + rows, z.shape[0])) for i in range(0, z.shape[0], rows)]


def _scaled_logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    inverse_temperature: float,
    dtype: torch.dtype,
) -> Tensor:
    if inverse_temperature != 1.0 and hidden.dtype == dtype:
        hidden = hidden * inverse_temperature
        bias = None if bias is None else bias * inverse_temperature
        inverse_temperature = 1.0  # scaling hidden instead of logits is V/H times less work
    logits = matmul_nt(hidden, weight)
    if bias is not None:
        logits += bias
    logits = logits.to(dtype)
    return logits if inverse_temperature == 1.0 else logits.mul_(inverse_temperature)


def _restrict(z: Tensor, targets: Tensor, nuclei: Nuclei, start: int) -> None:
    """Set ``z`` to −inf outside the nuclei of the rows from ``start`` on, except for the
    targets.
    """
    bounds = nuclei.offsets[start : start + z.shape[0] + 1]
    sizes = torch.tensor([b - a for a, b in itertools.pairwise(bounds)], device=z.device)
    rows = torch.arange(z.shape[0], device=z.device).repeat_interleave(sizes)
    outside = (sizes > 0)[:, None].repeat(1, z.shape[1])
    outside[rows, nuclei.ids[bounds[0] : bounds[-1]]] = False
    # The engine may have rounded differently at the boundary of a nucleus, but its token must keep
    # a finite log-prob.
    outside.scatter_(1, targets[:, None], False)
    z.masked_fill_(outside, float("-inf"))


def _score_rows(
    z: Tensor, targets: Tensor, with_entropy: bool, leave_probabilities: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return log_prob, logsumexp and entropy of rows. ``z`` is overwritten, if required with its
    softmax.
    """
    largest = z.amax(-1, keepdim=True)
    picked = z.gather(-1, targets[:, None]).squeeze(-1)
    e = (z - largest).exp_()
    total = e.sum(-1, keepdim=True)
    # Subtracting the maximum of a row keeps exp finite. It is added to the logarithm again.
    log_sum = (total.log() + largest).squeeze(-1)
    entropy = log_sum - torch.linalg.vecdot(e, z) / total.squeeze(-1) if with_entropy else None
    if leave_probabilities:
        torch.div(e, total, out=z)
    return picked - log_sum, log_sum, entropy


def _logit_gradient(
    z: Tensor,
    targets: Tensor,
    log_sums: Tensor,
    grad: Tensor,
    grad_entropy: Tensor,
    entropy: Tensor,
) -> Tensor:
    """Return the gradient with respect to z ``[r, V]``, which it overwrites. The other tensors are
    ``[r, 1]``.
    """
    log_p = z.sub_(log_sums)
    p = log_p.exp()
    dz = log_p.add_(entropy).mul_(-grad_entropy).sub_(grad).mul_(p)
    return dz.scatter_add_(-1, targets, grad)
