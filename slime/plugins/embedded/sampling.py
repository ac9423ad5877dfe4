"""Sample tokens from logits, and compute the log-probs of the sampled tokens.

Output token ``t`` of a request is sampled with one uniform number, which depends only on the seed
of the request and on ``t``. The token is found with the inverse of the cumulative distribution, so
no sort is needed unless the request uses top-k, top-p or min-p. The log-probs are those of the
whole distribution at the request's temperature, as in SGLang. With ``return_top_p_token_ids`` they
are those of the filtered distribution, which the trainer computes too.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np
import torch

from slime.models.token_log_probs import Kernels
from slime.plugins.embedded.scheduler import SampledToken
from slime.plugins.embedded.sequence import Sequence

_BLOCK = 128  # tokens per block of the first cumulative sum
# top-p sorts only the best so many tokens, if their total probability is large enough
_CANDIDATES = 1024


def uniforms(seeds: Rows[int], steps: Rows[int]) -> np.ndarray:
    """Return one number in [0, 1) per pair of seed and step, as float64 with 53 random bits.

    The numbers are computed with splitmix64 over seed and step. Source: Steele, Lea, Flood, "Fast
    splittable pseudorandom number generators", OOPSLA 2014.
    """
    with np.errstate(over="ignore"):
        state = np.array([seed % 2**64 for seed in seeds], dtype=np.uint64)
        mixed = _mix(state + np.uint64(0x9E3779B97F4A7C15))
        mixed = _mix(
            mixed
            ^ (np.array(steps, dtype=np.uint64) + np.uint64(1)) * np.uint64(0xD1342543DE82EF95)
        )
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(state: np.ndarray) -> np.ndarray:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


@torch.inference_mode()
def sample_tokens(
    logits: torch.Tensor,
    sequences: Rows[Sequence],
    eos: frozenset[int],
    kernels: Kernels | None = None,
) -> list[SampledToken]:
    """Sample one token per sequence.

    Args:
        logits: ``[rows ≥ len(sequences), vocab]``. Rows after those of the sequences are padding.
            May be overwritten.
        eos: The end-of-sequence tokens, which are not sampled before ``min_new_tokens``.
        kernels: What computes the log-probs, without penalties and biases; None for this module.
    """
    scores = logits.float()
    count = len(sequences)
    _adjust(scores, sequences, eos)
    temperatures = [
        1.0 if seq.request.params.greedy else seq.request.params.temperature for seq in sequences
    ]
    if any(t != 1.0 for t in temperatures):
        padded = temperatures + [1.0] * (scores.shape[0] - count)
        scores = scores.div_(on_device(torch.tensor(padded), scores.device)[:, None])
    probs = torch.softmax(scores, dim=-1)
    best = scores.argmax(dim=-1)
    chosen, nuclei = _choose(probs, best, sequences)
    if kernels is None:
        logprobs = token_logprobs(scores, probs, best, chosen)
    else:
        divisors = torch.tensor(temperatures, device=logits.device)
        logprobs = kernels.score(logits[:count], chosen, divisors)[0]
    # The host waits for the device once, for both: float64 holds them exactly.
    pairs = torch.stack([chosen.double(), logprobs.double()], dim=1).tolist()
    sampled = [SampledToken(int(token), logprob) for token, logprob in pairs]
    for row, (seq, one) in enumerate(zip(sequences, sampled, strict=True)):
        request = seq.request
        if request.return_top_p_token_ids:
            one.nucleus = nuclei[row].tolist()
            one.logprob = float(scores[row, one.token] - scores[row, nuclei[row]].logsumexp(0))
        if request.top_logprobs_num or request.token_ids_logprob:
            row_logprobs = torch.log_softmax(scores[row], dim=-1)
            one.top, one.chosen = top_and_chosen(
                row_logprobs, request.top_logprobs_num, request.token_ids_logprob
            )
    return sampled


def token_logprobs(
    scores: torch.Tensor, probs: torch.Tensor, best: torch.Tensor, tokens: torch.Tensor
) -> torch.Tensor:
    """Return the log-probs ``[len(tokens)]`` of one token per row, as exact as log_softmax, from a
    given softmax.

    ``log p(token) = (score(token) - score(best)) + log p(best)``. The logarithm of ``p(token)``
    itself would be inexact for small probabilities; ``p(best)`` is never small.

    Args:
        scores, probs: ``[rows ≥ len(tokens), vocab]``.
        best: ``[rows]``, the argmax of ``scores``.
    """
    rows = tokens.shape[0]
    best = best[:rows, None]
    behind = scores[:rows].gather(1, tokens[:, None]) - scores[:rows].gather(1, best)
    return (behind + probs[:rows].gather(1, best).log())[:, 0]


def top_and_chosen(
    logprobs: torch.Tensor, top: int, chosen: Rows[int]
) -> tuple[list[tuple[float, int]], list[tuple[float, int]]]:
    """Return (log-prob, id) of the ``top`` best tokens at one position, and of the ``chosen``
    ids.
    """
    best: list[tuple[float, int]] = []
    if top:
        values, ids = torch.topk(logprobs, min(top, logprobs.shape[-1]))
        best = list(zip(values.tolist(), ids.tolist(), strict=True))
    asked = [(float(logprobs[token]), token) for token in chosen]
    return best, asked


def _adjust(scores: torch.Tensor, sequences: Rows[Sequence], eos: frozenset[int]) -> None:
    """Apply penalties and logit bias, and exclude end tokens before ``min_new_tokens``. ``scores``
    is changed.
    """
    for row, seq in enumerate(sequences):
        params = seq.request.params
        if params.penalised:
            _penalise(scores[row], seq)
        for token, bias in params.logit_bias:
            scores[row, token] += bias
        if seq.num_output < params.min_new_tokens:
            ends = [token for token in eos | params.stop_token_ids if token < scores.shape[1]]
            scores[row, ends] = float("-inf")


def _penalise(row: torch.Tensor, seq: Sequence) -> None:
    """Apply the penalties to the scores of one sequence.

    As in SGLang, the frequency and presence penalties count output tokens, and the repetition
    penalty counts tokens of prompt and output.
    """
    params = seq.request.params
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(seq.tokens)), device=row.device)
        values = row[seen]
        row[seen] = torch.where(
            values > 0, values / params.repetition_penalty, values * params.repetition_penalty
        )
    if seq.num_output and (params.frequency_penalty or params.presence_penalty):
        ids, counts = np.unique(np.asarray(seq.output_ids), return_counts=True)
        penalty = params.frequency_penalty * counts + params.presence_penalty
        row[torch.as_tensor(ids, device=row.device)] -= torch.as_tensor(
            penalty, dtype=row.dtype, device=row.device
        )


def _choose(
    probs: torch.Tensor, best: torch.Tensor, sequences: Rows[Sequence]
) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """Return one token per sequence, int64, and for each row that was filtered the ids left by the
    filters.
    """
    count = len(sequences)
    greedy = [seq.request.params.greedy for seq in sequences]
    filtered = [row for row, seq in enumerate(sequences) if seq.request.params.filtered]
    numbers = uniforms([seq.seed for seq in sequences], [seq.num_output for seq in sequences])
    if sum(greedy) + len(filtered) == count:
        tokens = best[:count].clone()
    else:
        # All rows are computed, including padding: in deterministic mode the shapes must not depend
        # on the batch.
        padded = np.zeros(probs.shape[0])
        padded[:count] = numbers
        uniform = on_device(torch.from_numpy(padded), probs.device)
        tokens = inverse_cdf(probs, uniform)[:count]
        if any(greedy):
            certain = on_device(torch.tensor(greedy), probs.device)
            tokens = torch.where(certain, best[:count], tokens)
    nuclei: dict[int, torch.Tensor] = {}
    for row in filtered:
        tokens[row], nuclei[row] = _filtered(probs[row], sequences[row], float(numbers[row]))
    return tokens, nuclei


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor of the CPU on a device. The host does not wait for the copy."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def inverse_cdf(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Return ``[rows]`` int64: the token at which the cumulative sum of ``probs`` (``[rows,
    vocab]``) exceeds ``uniform``.

    To avoid a cumulative sum over the whole vocabulary, the function first finds the block of
    tokens that contains the number, from the sums of the blocks in float64, and then the token in
    this block. A token with probability zero is never sampled.
    """
    rows, vocab = probs.shape
    blocks = -(-vocab // _BLOCK)
    if vocab % _BLOCK:
        probs = torch.nn.functional.pad(probs, (0, blocks * _BLOCK - vocab))
    parts = probs.view(rows, blocks, _BLOCK)
    mass = parts.sum(dim=-1).double().cumsum(dim=-1)
    target = uniform.to(device=probs.device, dtype=torch.float64)[:, None] * mass[:, -1:]
    block = torch.searchsorted(mass, target, right=True).clamp_(max=blocks - 1)
    before = torch.where(block > 0, mass.gather(1, (block - 1).clamp(min=0)), 0.0)
    inside = parts.gather(1, block[:, :, None].expand(-1, -1, _BLOCK))[:, 0].double()
    cumulative = before + inside.cumsum(dim=-1)
    offset = torch.searchsorted(cumulative, target, right=True)
    # Rounding may put the target beyond the last sum, so the result is limited to the last token
    # with a probability.
    last = (_BLOCK - 1) - (inside > 0).flip(1).int().argmax(dim=1, keepdim=True)
    return (block * _BLOCK + torch.minimum(offset, last))[:, 0]


def _filtered(probs: torch.Tensor, seq: Sequence, uniform: float) -> tuple[int, torch.Tensor]:
    """Sample from the tokens that top-k, top-p and min-p leave, with renormalized probabilities.

    The order is that of SGLang: top-k is applied first, then top-p. Returns the token and the ids
    that were left.
    """
    params = seq.request.params
    vocab = probs.shape[-1]
    width = min(params.top_k, vocab) if params.top_k > 0 else min(_CANDIDATES, vocab)
    values, ids = torch.topk(probs, width)
    # Sort the whole vocabulary only if the candidates may not contain all tokens that the filters
    # leave.
    if (
        params.top_k <= 0
        and width < vocab
        and (params.min_p > 0 or float(values.sum()) < params.top_p)
    ):
        values, ids = torch.sort(probs, descending=True, stable=True)
    mass = values.double()
    before = mass.cumsum(0) - mass
    keep = before <= params.top_p
    if params.min_p > 0:
        keep &= mass >= params.min_p * mass[0]
    kept = torch.where(keep, mass, 0.0).cumsum(0)
    index = int(torch.searchsorted(kept, uniform * kept[-1], right=True))
    return int(ids[min(index, int(keep.sum()) - 1)]), ids[keep]


@torch.inference_mode()
def score_prompt(
    logits: torch.Tensor, seq: Sequence, positions: Rows[int], kernels: Kernels | None = None
) -> None:
    """Append the log-probs of the prompt tokens after ``positions`` to the sequence, at temperature
    1.

    Args:
        logits: ``[≥ len(positions), vocab]``, the logits at ``positions``.
    """
    scores = logits.float()
    request = seq.request
    tokens = torch.tensor(
        [request.input_ids[position + 1] for position in positions], device=scores.device
    )
    if kernels is None:
        probs = torch.softmax(scores, dim=-1)
        found = token_logprobs(scores, probs, scores.argmax(dim=-1), tokens)
    else:
        found = kernels.score(logits[: len(positions)], tokens, scores.new_ones(len(tokens)))[0]
    seq.input_logprobs += found.tolist()
    if request.top_logprobs_num:
        for row in scores:
            seq.input_top.append(
                top_and_chosen(torch.log_softmax(row, -1), request.top_logprobs_num, ())[0]
            )
