"""Sampling tokens from logits, and the log-probs of the sampled tokens.

Output token ``t`` of a request is sampled with one uniform number that depends on its seed and ``t`` only, taken
through the inverse of the cumulative distribution: no sort is needed unless the request filters.
Log-probs are those of the whole distribution at the request's temperature, as SGLang returns them; with
``return_top_p_token_ids`` those of what the filters left, which the trainer then scores again.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np
import torch

from slime.engines.embedded.scheduler import SampledToken
from slime.engines.embedded.sequence import Sequence

_BLOCK = 128  # the cumulative sum is taken over blocks first
_CANDIDATES = 1024  # top-p sorts only so many tokens, where they hold enough of the mass


def uniforms(seeds: Rows[int], steps: Rows[int]) -> np.ndarray:
    """One number in [0, 1) per (seed, step): splitmix64 over both, 53 bits, float64.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
    """
    with np.errstate(over="ignore"):
        state = np.array([seed % 2**64 for seed in seeds], dtype=np.uint64)
        mixed = _mix(state + np.uint64(0x9E3779B97F4A7C15))
        mixed = _mix(mixed ^ (np.array(steps, dtype=np.uint64) + np.uint64(1)) * np.uint64(0xD1342543DE82EF95))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(state: np.ndarray) -> np.ndarray:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


@torch.inference_mode()
def sample_tokens(logits: torch.Tensor, sequences: Rows[Sequence], eos: frozenset[int]) -> list[SampledToken]:
    """Sample one token per sequence.

    Args:
        logits: ``[rows ≥ len(sequences), vocab]``; rows beyond the sequences are padding. Overwritten.
        eos: tokens that ``min_new_tokens`` keeps away.
    """
    scores = logits.float()
    count = len(sequences)
    _adjust(scores, sequences, eos)
    temperatures = [1.0 if seq.request.params.greedy else seq.request.params.temperature for seq in sequences]
    if any(t != 1.0 for t in temperatures):
        padded = temperatures + [1.0] * (scores.shape[0] - count)
        scores = scores.div_(torch.tensor(padded, device=scores.device)[:, None])
    probs = torch.softmax(scores, dim=-1)
    best = scores.argmax(dim=-1)
    tokens, nuclei = _choose(probs, best, sequences)
    logprobs = token_logprobs(scores, probs, best, torch.tensor(tokens, device=probs.device)).tolist()
    sampled = [SampledToken(token, logprob) for token, logprob in zip(tokens, logprobs, strict=True)]
    for row, (seq, one) in enumerate(zip(sequences, sampled, strict=True)):
        request = seq.request
        if request.return_top_p_token_ids:
            one.nucleus = nuclei[row].tolist()
            one.logprob = float(scores[row, one.token] - scores[row, nuclei[row]].logsumexp(0))
        if request.top_logprobs_num or request.token_ids_logprob:
            row_logprobs = torch.log_softmax(scores[row], dim=-1)
            one.top, one.chosen = top_and_chosen(row_logprobs, request.top_logprobs_num, request.token_ids_logprob)
    return sampled


def token_logprobs(scores: torch.Tensor, probs: torch.Tensor, best: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Log-probs ``[len(tokens)]`` of one token per row, as exact as log_softmax, from a softmax that is there already.

    ``log p(token) = (score(token) - score(best)) + log p(best)``, where ``p(best)`` is never small.

    Args:
        scores, probs: ``[rows ≥ len(tokens), vocab]``; best: ``[rows]``, the argmax of ``scores``.
    """
    rows = tokens.shape[0]
    best = best[:rows, None]
    behind = scores[:rows].gather(1, tokens[:, None]) - scores[:rows].gather(1, best)
    return (behind + probs[:rows].gather(1, best).log())[:, 0]


def top_and_chosen(
    logprobs: torch.Tensor, top: int, chosen: Rows[int]
) -> tuple[list[tuple[float, int]], list[tuple[float, int]]]:
    """The ``top`` best (log-prob, id) of one position, and those of the ``chosen`` ids."""
    best: list[tuple[float, int]] = []
    if top:
        values, ids = torch.topk(logprobs, min(top, logprobs.shape[-1]))
        best = list(zip(values.tolist(), ids.tolist(), strict=True))
    asked = [(float(logprobs[token]), token) for token in chosen]
    return best, asked


def _adjust(scores: torch.Tensor, sequences: Rows[Sequence], eos: frozenset[int]) -> None:
    """Penalties, logit bias, and no end before ``min_new_tokens``; in place, only where asked for."""
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
    """Frequency and presence count output tokens; repetition counts prompt and output (as in SGLang)."""
    params = seq.request.params
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(seq.tokens)), device=row.device)
        values = row[seen]
        row[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if seq.num_output and (params.frequency_penalty or params.presence_penalty):
        ids, counts = np.unique(np.asarray(seq.output_ids), return_counts=True)
        penalty = params.frequency_penalty * counts + params.presence_penalty
        row[torch.as_tensor(ids, device=row.device)] -= torch.as_tensor(penalty, dtype=row.dtype, device=row.device)


def _choose(
    probs: torch.Tensor, best: torch.Tensor, sequences: Rows[Sequence]
) -> tuple[list[int], dict[int, torch.Tensor]]:
    """A token per sequence, and by row the ids that a filtered one was sampled from."""
    count = len(sequences)
    tokens = [0] * count
    nuclei: dict[int, torch.Tensor] = {}
    plain = [i for i, seq in enumerate(sequences) if not seq.request.params.greedy and not seq.request.params.filtered]
    greedy = [i for i, seq in enumerate(sequences) if seq.request.params.greedy]
    numbers = uniforms([seq.seed for seq in sequences], [seq.num_output for seq in sequences])
    if greedy:
        top = best.tolist()
        for row in greedy:
            tokens[row] = top[row]
    if plain:
        padded = np.zeros(probs.shape[0])
        padded[:count] = numbers
        chosen = inverse_cdf(probs, torch.from_numpy(padded)).tolist()
        for row in plain:
            tokens[row] = chosen[row]
    for row, seq in enumerate(sequences):
        if seq.request.params.filtered:
            tokens[row], nuclei[row] = _filtered(probs[row], seq, float(numbers[row]))
    return tokens, nuclei


def inverse_cdf(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """``[rows]`` int64: the token at which the cumulative sum of ``probs`` (``[rows, vocab]``) passes ``uniform``.

    Sums of blocks first, in float64, then the one block that the number falls into: two small passes instead
    of a cumulative sum over the vocabulary. A token of probability zero is never sampled.
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
    last = (_BLOCK - 1) - (inside > 0).flip(1).int().argmax(dim=1, keepdim=True)  # rounding must not run past it
    return (block * _BLOCK + torch.minimum(offset, last))[:, 0]


def _filtered(probs: torch.Tensor, seq: Sequence, uniform: float) -> tuple[int, torch.Tensor]:
    """Draw from what top-k, top-p and min-p leave, renormalised (top-k first, then top-p: SGLang's order).

    Returns the token and the ids that were left.
    """
    params = seq.request.params
    vocab = probs.shape[-1]
    width = min(params.top_k, vocab) if params.top_k > 0 else min(_CANDIDATES, vocab)
    values, ids = torch.topk(probs, width)
    if params.top_k <= 0 and width < vocab and (params.min_p > 0 or float(values.sum()) < params.top_p):
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
def score_prompt(logits: torch.Tensor, seq: Sequence, positions: Rows[int]) -> None:
    """Add the log-probs of the prompt tokens after ``positions`` (at temperature 1) to the sequence.

    ``logits``: ``[≥ len(positions), vocab]``.
    """
    scores, request = logits.float(), seq.request
    tokens = torch.tensor([request.input_ids[position + 1] for position in positions], device=scores.device)
    probs = torch.softmax(scores, dim=-1)
    seq.input_logprobs += token_logprobs(scores, probs, scores.argmax(dim=-1), tokens).tolist()
    if request.top_logprobs_num:
        for row in scores:
            seq.input_top.append(top_and_chosen(torch.log_softmax(row, -1), request.top_logprobs_num, ())[0])
