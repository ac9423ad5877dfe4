"""The reference of ``slime gap``: plain transformers in float32 with the trainer's weights, one
sample at a time, as it is or with changes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from slime.backends.fsdp.experts import RoutingReplay
from slime.models.loading import decoder_layers

MOST_ROWS = 4096
"""The tokens of a forward pass, with padding."""
Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class GapSample:
    """One sample of the step, as both sides have scored it.

    Attributes:
        tokens: The prompt and the response, int64 ``[total]``.
        engine, trainer: Their log-probs, float ``[response_length]``.
        mask: Whether a token is trained, bool ``[response_length]``. Only these are compared.
        stale: Whether weights before those of the step have sampled it, of the same shape.
        nuclei: With sampling masks, the token ids among which each response token was drawn, if
            both sides know them.
        routes: The experts that the engine chose, ``[total - 1, layers, topk]``.
    """

    index: int
    tokens: Tensor
    engine: Tensor
    trainer: Tensor
    mask: Tensor
    stale: Tensor
    nuclei: Sequence[Tensor] | None = None
    routes: Tensor | None = None

    @property
    def gap(self) -> Tensor:
        """The engine's log-probs minus the trainer's, of the compared tokens, float64."""
        return (self.engine.double() - self.trainer.double())[self.mask]


@dataclass(frozen=True)
class Sampling:
    """What is done to logits before their softmax. ``whole`` leaves the recorded nuclei out."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    whole: bool = False


@dataclass(frozen=True)
class Setup:
    """A way to score the samples.

    Attributes:
        weights: By their names in the checkpoint.
        dtype: What the model computes in.
        patches: Change the model after it was loaded.
        stale_only: Whether only stale tokens are scored in this way, and the others as always.
        routed: Whether the experts of each token are those that the engine chose.
    """

    weights: Weights = field(compare=False)
    sampling: Sampling
    dtype: torch.dtype = torch.float32
    patches: tuple[Callable[[PreTrainedModel], None], ...] = ()
    stale_only: bool = False
    routed: bool = False


def load(like: PreTrainedModel, weights: Weights, dtype: torch.dtype) -> PreTrainedModel:
    """Return a model of the config and on the device of another, with other weights."""
    model: PreTrainedModel = type(like).from_pretrained(
        None,
        config=copy.deepcopy(like.config),
        state_dict=dict(weights),
        dtype=dtype,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    return model.eval().to(like.device)


class Reference:
    """Scores samples.

    Args:
        like: A model of :func:`load` with the weights and dtype of ``plain``.
        samples: The samples that are scored.
    """

    def __init__(self, like: PreTrainedModel, plain: Setup, samples: Sequence[GapSample]) -> None:
        self.like = like
        self.plain = plain
        self.samples = samples
        self.engine = torch.cat([one.engine[one.mask].double() for one in samples])
        self.gap = torch.cat([one.gap for one in samples])
        self.trainer = self.engine - self.gap
        self.stale = torch.cat([one.stale[one.mask] for one in samples])
        self._logits: list[Tensor] = []
        self.score = self.scored(plain)

    def model(self, setup: Setup) -> PreTrainedModel:
        """Return the model of a setup."""
        plain = self.plain.weights
        other = {name: t for name, t in setup.weights.items() if t is not plain.get(name)}
        if (
            setup.dtype == self.plain.dtype
            and other.keys() <= dict(self.like.named_parameters()).keys()
        ):
            # Far faster than loading.
            model = copy.deepcopy(self.like)
            for name, parameter in model.named_parameters():
                if name in other:
                    parameter.data.copy_(other[name])
        else:
            model = load(self.like, setup.weights, setup.dtype)
        for patch in setup.patches:
            patch(model)
        return model

    @torch.no_grad()
    def scored(self, setup: Setup) -> Tensor:
        """Return the log-probs of all compared tokens of a setup, float64 ``[tokens]``."""
        # What only changes the sampling needs no pass of its own.
        same = replace(setup, sampling=self.plain.sampling) == self.plain
        logits = self._logits if same and setup.weights is self.plain.weights else []
        if not logits:
            model = self.model(setup)
            replay = RoutingReplay(decoder_layers(model)) if setup.routed else None
            for some in _batches(self.samples, 1 if setup.routed else MOST_ROWS):
                if replay is not None:
                    _follow(replay, some[0], model.device)
                logits += [rows.float() for rows in logits_of(model, some)]
        found = torch.cat(
            [
                token_scores(rows, one, setup.sampling)
                for rows, one in zip(logits, self.samples, strict=True)
            ]
        )
        return torch.where(self.stale, found, self.score) if setup.stale_only else found

    def with_samples(self, samples: Sequence[GapSample]) -> Reference:
        """Return the same for other samples."""
        return Reference(self.like, self.plain, samples)


def _batches(samples: Sequence[GapSample], most: int) -> Iterator[Sequence[GapSample]]:
    """Divide samples into batches of at most ``most`` tokens with padding, and at least one
    sample.
    """
    start = 0
    for end in range(1, len(samples) + 1):
        longest = max(len(one.tokens) for one in samples[start : end + 1])
        if end == len(samples) or longest * (end + 1 - start) > most:
            yield samples[start:end]
            start = end


def logits_of(model: PreTrainedModel, samples: Sequence[GapSample]) -> list[Tensor]:
    """Return the logits of the compared tokens of each sample, ``[tokens, vocab]``."""
    # Padding on the right changes nothing before it, since models look only backwards.
    tokens = nn.utils.rnn.pad_sequence([one.tokens[:-1] for one in samples], batch_first=True)
    logits = model(input_ids=tokens.to(model.device), use_cache=False).logits
    found = []
    for rows, one in zip(logits, samples, strict=True):
        end = len(one.tokens) - 1
        found.append(rows[end - len(one.mask) : end][one.mask.to(rows.device)])
    return found


def token_scores(logits: Tensor, sample: GapSample, sampling: Sampling) -> Tensor:
    """Return the log-probs of the compared tokens of a sample, float64 ``[tokens]``."""
    targets = sample.tokens[-len(sample.mask) :][sample.mask].to(logits.device)
    z = logits.double() / sampling.temperature
    kept = torch.ones_like(z, dtype=torch.bool)
    if sample.nuclei is not None and not sampling.whole:
        for row, place in enumerate(sample.mask.nonzero()[:, 0].tolist()):
            kept[row] = False
            kept[row, sample.nuclei[place].long().to(logits.device)] = True
    if sampling.top_k or sampling.top_p < 1:
        best, order = z.sort(-1, descending=True)
        before = best.softmax(-1).cumsum(-1) - best.softmax(-1)
        keep = before < sampling.top_p
        keep[:, sampling.top_k or len(z[0]) :] = False
        kept &= torch.zeros_like(kept).scatter(1, order, keep)
    kept.scatter_(1, targets[:, None], True)
    z = z.masked_fill(~kept, -torch.inf)
    return (z.gather(1, targets[:, None])[:, 0] - z.logsumexp(-1)).cpu()


# --- routers --------------------------------------------------------------------------------------


def routers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the modules that choose experts: their output is (logits, weights, experts)."""
    named = model.named_modules()
    return {name: one for name, one in named if type(one).__name__.endswith("TopKRouter")}


def _follow(replay: RoutingReplay, sample: GapSample, device: torch.device) -> None:
    """Let a model use the recorded experts of one sample, if it has some."""
    replay.routes = None
    if sample.routes is not None:
        rows = np.arange(len(sample.tokens) - 1)
        replay.follow([sample.routes], [(rows, rows)], sample.tokens[:-1].to(device))
