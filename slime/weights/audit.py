"""Do the engines hold what the trainer sent? Asked after each sync; a mismatch ends the run.

(a) :func:`check_probe`: a fixed sequence is scored by every engine and by the trainer.
(b) :func:`check_engines_agree`: engines of one layout have equal checksums.
(c) :func:`overwrite` and :func:`check_restored` around a sync of the same weights: every tensor was written.
(d) :func:`check_digests`: digests by name of what was sent and of what is held, on engines that know checkpoint
    names and on SGLang where its own names are known (:mod:`slime.weights.fused`).
(e) :func:`check_changes`: on all other engines, what each rank holds changed with what was sent, and only with it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from slime.config.seeds import derive_seed
from slime.engines.fan_out import on_each
from slime.engines.handle import EngineHandle
from slime.engines.sglang_api import EngineInfo
from slime.weights.changes import Fingerprint, Held, wrong_changes
from slime.weights.settings import WeightSyncSettings

PROBE_LENGTH = 64
THRESHOLDS = {"float32": 1e-3, "float16": 0.25, "bfloat16": 1.0}
"""Largest difference of a log-prob that rounding explains in any model, by the coarser dtype of trainer and engine;
:class:`Calibration` learns what it is in this one. SmolLM2 on a probe of 64 random tokens: bfloat16 against float32
differs by up to 0.4, one zeroed matrix by 3. What is finer than that is found by checksums."""
GAP_THRESHOLDS = {"float32": 0.01, "float16": 0.05, "bfloat16": 0.1}
"""Mean difference of the log-probs of a step's samples from which on it is worth a warning, by the coarser dtype."""
_SHOWN = 5


class WeightAuditError(RuntimeError):
    """An engine holds other weights than the trainer. ``engine``: its URL; ``tensors``: names, where known."""

    def __init__(self, message: str, engine: str, tensors: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.engine, self.tensors = engine, list(tensors)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self), self.engine, self.tensors)


@dataclass(frozen=True)
class Probe:
    """A sequence and the trainer's log-prob of each of its tokens but the first (length ``len(tokens) - 1``)."""

    tokens: Sequence[int]
    log_probs: Sequence[float]


def probe_tokens(vocab_size: int, seed: int = 0, length: int = PROBE_LENGTH) -> list[int]:
    """The fixed sequence: random ids, the same for the whole run and on every machine."""
    generator = random.Random(derive_seed(seed, "weight-probe"))
    return [generator.randrange(vocab_size) for _ in range(length)]


@dataclass
class Calibration:
    """What rounding makes of the probe in this run, learned from the updates that passed.

    The limit by dtype must allow for any model. A run's own differences are far smaller in most cases, so after the
    first update the limit is ``FACTOR`` times the largest difference so far plus ``MARGIN``, and never more than the
    limit by dtype.
    """

    FACTOR: ClassVar[float] = 3.0
    MARGIN: ClassVar[float] = 0.05
    largest: float | None = None

    def limit(self, by_dtype: float) -> float:
        if self.largest is None:
            return by_dtype
        return min(self.FACTOR * self.largest + self.MARGIN, by_dtype)

    def passed(self, differences: Iterable[float]) -> None:
        """Take in the differences of an update that passed."""
        finite = [value for value in differences if math.isfinite(value)]
        if finite:
            self.largest = max(*finite, self.largest or 0.0)


def threshold(asked: float | None, train_dtype: str | None, infos: Iterable[EngineInfo]) -> float:
    """``--audit-threshold`` where given, else what the coarsest dtype of trainer and engines allows."""
    if asked is not None:
        return asked
    dtypes = [info.dtype.removeprefix("torch.") for info in infos]
    if train_dtype:
        dtypes.append(train_dtype)
    return max((THRESHOLDS.get(dtype, THRESHOLDS["bfloat16"]) for dtype in dtypes), default=THRESHOLDS["bfloat16"])


def gap_alarm(metrics: Mapping[str, float], limit: float | None, dtypes: Sequence[str | None]) -> str | None:
    """A warning when trainer and engine disagree on a step's samples by more than ``--logprob-gap-threshold``
    in the mean, or when there is no number; None when all is well or no engine gave log-probs.

    Args:
        limit: the flag; None for what the coarsest of ``dtypes`` allows.
        dtypes: of the trainer and the engines, where known.
    """
    mean = metrics.get("train/train_rollout_logprob_abs_diff")
    if mean is None:
        return None
    if limit is None:
        limit = max(GAP_THRESHOLDS.get(dtype, GAP_THRESHOLDS["bfloat16"]) for dtype in dtypes if dtype)
    if mean <= limit:  # not for NaN
        return None
    worst = metrics.get("train/train_rollout_logprob_abs_diff_max", math.nan)
    k3 = metrics.get("train/train_rollout_k3", math.nan)
    return (
        f"warning: the engines' log-probs and the trainer's differ by {mean:.3g} in the mean (largest {worst:.3g}, k3 "
        f"{k3:.3g}), over --logprob-gap-threshold {limit:g}: stale samples, other numerics, or other weights"
    )


async def audit_engines(
    engines: Sequence[EngineHandle],
    infos: Mapping[str, EngineInfo],
    sent: Mapping[str, Mapping[str, str]],
    deadline: float,
    asked_always: Sequence[str] = (),
) -> dict[str, dict[str, str]]:
    """Checks (b) and (d), as far as there is something to compare with; returns checksums by engine URL.

    Args:
        sent: engine URL to digests of what was sent, under the names and by the function of that engine.
        asked_always: URLs of engines whose checksums are returned in any case.

    Raises:
        WeightAuditError: names the engine and the tensors.
    """
    asked = engines if len(engines) > 1 else [e for e in engines if sent.get(e.url) or e.url in asked_always]
    sums, failed = await on_each(asked, lambda engine: engine.checksum(), "compute its checksums", deadline)
    for error in failed.values():
        raise error
    for layout in _layouts(asked, infos):
        check_engines_agree({engine.url: sums[engine.url] for engine in layout})
    for url, digests in sent.items():
        if digests:
            check_digests(url, digests, sums[url])
    return sums


# --- (a) -----------------------------------------------------------------------------------------


async def score(engine: EngineHandle, tokens: Sequence[int]) -> list[float]:
    """The engine's log-prob of each token but the first, through ``/generate``."""
    request = {
        "input_ids": list(tokens),
        # Not greedy: among requests that are not, SGLang would sample all with top-k, whose kernel it compiles first.
        "sampling_params": {"max_new_tokens": 1, "temperature": 1.0, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    answer = await engine.generate(request)
    scored = answer["meta_info"]["input_token_logprobs"]
    values = [entry[0] for entry in scored if entry[0] is not None]
    if len(values) != len(tokens) - 1:
        raise WeightAuditError(
            f"engine {engine.url} scored {len(values)} of the {len(tokens) - 1} tokens of the probe", engine.url
        )
    return [float(value) for value in values]


async def check_probe(engines: Sequence[EngineHandle], probe: Probe, limit: float, deadline: float) -> dict[str, float]:
    """Score the probe on every engine; returns the largest difference by URL.

    Raises:
        WeightAuditError: a difference over ``limit``, or no number at all.
    """
    scores, failed = await on_each(engines, lambda engine: score(engine, probe.tokens), "score the probe", deadline)
    for error in failed.values():
        raise error
    gaps = {}
    for url, values in scores.items():
        differences = [abs(ours - theirs) for ours, theirs in zip(probe.log_probs, values, strict=True)]
        worst = max(range(len(differences)), key=lambda i: (differences[i] != differences[i], differences[i]))
        gaps[url] = differences[worst]
        if not differences[worst] <= limit:  # also for NaN
            raise WeightAuditError(
                f"engine {url} and the trainer disagree on the probe after the sync: token {worst + 1} has log-prob "
                f"{values[worst]:.6f} there and {probe.log_probs[worst]:.6f} here (difference "
                f"{differences[worst]:.2g}, allowed {limit:.2g}). "
                "Either the weights differ, or --audit-threshold is too small for these dtypes",
                url,
            )
    return gaps


async def probe_engines(
    settings: WeightSyncSettings, engines: Sequence[EngineHandle], probe: Probe, calibration: Calibration | None = None
) -> float:
    """(a) and (b), for engines that could not generate during the sync; returns the largest difference of (a).

    A server that only prefills or only decodes answers no request alone: it is held to (b) and (d). NaN when all do.
    """
    deadline = settings.phase_seconds
    infos, failed = await on_each(engines, lambda engine: engine.info(), "say what it is", deadline)
    for error in failed.values():
        raise error
    whole = [e for e in engines if infos[e.url].extra.get("disaggregation_mode") in (None, "null")]
    limit = threshold(settings.audit_threshold, settings.train_dtype, infos.values())
    if calibration is not None and settings.audit_threshold is None:
        limit = calibration.limit(limit)
    gaps = await check_probe(whole, probe, limit, deadline)
    if calibration is not None:
        calibration.passed(gaps.values())
    others = [engine for engine in engines if not engine.capabilities.named_checksums]  # these passed (d) already
    await audit_engines(others, infos, {}, deadline)
    return max(gaps.values(), default=math.nan)


# --- (b), (d) ------------------------------------------------------------------------------------


def check_engines_agree(sums: Mapping[str, Mapping[str, str]]) -> None:
    """Raises :class:`WeightAuditError` for the engine that differs from the majority."""
    if len(sums) < 2:
        return
    names = sorted({name for named in sums.values() for name in named})
    wrong: dict[str, list[str]] = {url: [] for url in sums}
    for name in names:
        values = [named.get(name, "absent") for named in sums.values()]
        common = max(values, key=values.count)
        for url, named in sums.items():
            if named.get(name, "absent") != common:
                wrong[url].append(name)
    for url, tensors in wrong.items():
        if tensors:
            raise WeightAuditError(
                f"engine {url} holds other weights than the other engines: {_list(tensors)}", url, tensors
            )


def check_digests(url: str, sent: Mapping[str, str], held: Mapping[str, str]) -> None:
    """Compare what was sent with what an engine holds, by checkpoint name.

    Names that only one side has are no difference here: tied weights have one name there, frozen ones are
    not sent, and :func:`check_restored` shows what was never written.

    Raises:
        WeightAuditError: digests differ, or there is no common name.
    """
    common = sent.keys() & held.keys()
    if not common:
        raise WeightAuditError(
            f"engine {url} knows none of the {len(sent)} tensors that were sent (e.g. {min(sent)!r}); "
            f"it has e.g. {min(held, default='nothing')!r}", url
        )  # fmt: skip
    wrong = sorted(name for name in common if sent[name] != held[name])
    if wrong:
        raise WeightAuditError(
            f"engine {url} holds other bytes than were sent for {len(wrong)} of {len(common)} tensors: {_list(wrong)}",
            url,
            wrong,
        )


def check_changes(url: str, checksums: Mapping[str, str], sent: Mapping[str, Fingerprint], before: Held | None) -> None:
    """Check (e), see :mod:`slime.weights.changes`; nothing to compare with before the second update of an engine.

    Raises:
        WeightAuditError: a tensor did not change with what was sent, or differs between ranks.
    """
    if before is None:
        return
    wrong = wrong_changes(checksums, sent, before)
    if wrong:
        told = "; ".join(f"{_list(names)} {what}" for what, names in wrong.items())
        raise WeightAuditError(
            f"engine {url} does not hold the weights that were sent: {told}",
            url,
            [name for names in wrong.values() for name in names],
        )


def _layouts(engines: Sequence[EngineHandle], infos: Mapping[str, EngineInfo]) -> list[list[EngineHandle]]:
    """Engines whose checksums must be equal: same server, dtype and tensor parallel size."""
    groups: dict[tuple[str, str, str, int], list[EngineHandle]] = {}
    for engine in engines:
        info = infos[engine.url]
        groups.setdefault((info.kind, info.version, info.dtype, info.tensor_parallel_size), []).append(engine)
    return list(groups.values())


def _list(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"


# --- (c) -----------------------------------------------------------------------------------------


async def overwrite(engine: EngineHandle) -> dict[str, str]:
    """Let the engine fill its weights with noise; returns the checksums of what it held.

    Not SGLang's own snapshot and comparison: they need CUDA, and room for a copy of the weights.
    """
    before = await engine.checksum()
    await engine.check_weights("reset_tensors")
    return before


async def check_restored(
    engines: Sequence[EngineHandle], before: Mapping[str, Mapping[str, str]], deadline: float
) -> None:
    """After a sync of the same weights: is every tensor back?

    Args:
        before: checksums from before :func:`overwrite`, by engine URL.

    Raises:
        WeightAuditError: names the engine and the tensors.
    """
    after, failed = await on_each(engines, lambda engine: engine.checksum(), "compute its checksums", deadline)
    for error in failed.values():
        raise error
    for url, held in after.items():
        wrong = sorted(name for name, digest in before[url].items() if held.get(name) != digest)
        if wrong:
            raise WeightAuditError(
                f"engine {url} does not hold what it held before the sync of the same weights: {len(wrong)} of "
                f"{len(held)} tensors differ: {_list(wrong)}",
                url,
                wrong,
            )
