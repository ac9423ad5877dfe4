"""What a run records about itself so that one of its steps can be computed again (``slime replay``).

``attempts.jsonl`` has a line for each time that the run was started or resumed: the settings of this attempt, and the
values that are known only after the start, such as the length of the run and the number of threads. ``weights.jsonl``
has a line with a digest of the weights for each update of the engines.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import xxhash

from slime.observability.best_effort import best_effort
from slime.observability.regular import parse_json, regular
from slime.observability.run_dir import RunDir, read_settings
from slime.types import JsonObject


@dataclass(frozen=True)
class Settled:
    """Values of a run that its flags do not determine alone.

    Attributes:
        asynchronous: Whether the loop of train_async.py ran.
        on_gpu: Whether the training ranks had GPUs.
        threads: CPU threads of each training rank.
        max_tokens: The token budget of micro-batches, also if it was measured (``--max-tokens-per-gpu``).
        forward_tokens: The budget of passes without a backward (``--log-probs-max-tokens-per-gpu``).
        first_rollout: The first rollout that this process trained.
        loaded: The snapshot from which it began, or whose weights it took; None for ``--hf-checkpoint``.
        working_directory: What relative paths of the settings refer to.
    """

    asynchronous: bool
    on_gpu: bool
    num_rollout: int
    threads: int
    max_tokens: int | None
    forward_tokens: int | None
    first_rollout: int
    loaded: str | None
    working_directory: str


@dataclass(frozen=True)
class Attempt:
    """One start of a run: the settings as in ``config.yaml``, and what the start has settled."""

    settled: Settled
    settings: JsonObject


@dataclass(frozen=True)
class SentWeights:
    """The weights of one update of the engines.

    Attributes:
        version: ``attempt.step``, where ``step`` is the number of rollouts that have trained the weights.
        digest: See :func:`digest_of_digests`.
        dtype: The dtype of floating-point tensors on the engines; None if the tensors were not cast.
        tensors: The number of tensors. An update may leave out frozen ones.
    """

    version: str
    digest: str
    dtype: str | None
    tensors: int

    @property
    def step(self) -> int:
        return int(self.version.rpartition(".")[2])


def digest_of_digests(digests: Mapping[str, str]) -> str:
    """Return one XXH3-128 (hex) for the digests of many tensors by name, in the order of the names."""
    lines = (f"{name} {digest}\n" for name, digest in sorted(digests.items()))
    return xxhash.xxh3_128_hexdigest("".join(lines).encode())


def append_attempt(run: RunDir, settled: Settled) -> None:
    """Record what this attempt has settled, together with the settings that are in ``config.yaml`` now.

    A run that is resumed with other flags replaces ``config.yaml``; the line keeps the settings of the earlier steps.
    """
    with best_effort(run.attempts.name):
        settings = read_settings(run.config)
        # Only this user may read it, as with config.yaml.
        _append(run.attempts, {"settled": asdict(settled), "settings": settings}, 0o600)


def _append(path: Path, values: JsonObject, mode: int = 0o666) -> None:
    """Append a line of JSON, which is a line of its own also if a full disk has cut the one before."""
    with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, mode), "r+b") as file:
        file.seek(max(file.seek(0, os.SEEK_END) - 1, 0))
        cut = file.read() not in (b"", b"\n")
        file.write(b"\n" * cut + json.dumps(values).encode() + b"\n")


def read_attempts(run: RunDir) -> list[Attempt]:
    """Return the attempts, oldest first; none for a run of an older release, or one that ended during its start."""
    found = []
    for line in _lines(run.attempts):
        try:
            values = parse_json(line)
            attempt = Attempt(Settled(**values["settled"]), dict(values["settings"]))
        except (ValueError, TypeError, KeyError):  # the driver was killed while it wrote the last line
            continue
        if _is_settled(attempt.settled):
            found.append(attempt)
    return found


def _lines(path: Path) -> list[bytes]:
    try:
        return regular(path).read_bytes().splitlines()
    except OSError:
        return []


def _is_settled(settled: Settled) -> bool:
    """Whether the values of a line have the types of :class:`Settled`."""
    flags = (settled.asynchronous, settled.on_gpu)
    counts = (settled.num_rollout, settled.threads, settled.first_rollout)
    budgets = (settled.max_tokens, settled.forward_tokens)
    return (
        all(type(flag) is bool for flag in flags)
        and all(type(count) is int and 0 <= count < 2**63 for count in counts)
        and all(budget is None or (type(budget) is int and 0 < budget < 2**63) for budget in budgets)
        and isinstance(settled.working_directory, str)
        and (settled.loaded is None or isinstance(settled.loaded, str))
    )


def lineage(attempts: Sequence[Attempt]) -> list[Attempt]:
    """Return the attempts that made the steps of the run, by their first rollouts.

    An attempt that is resumed before the first rollout of an earlier one has trained all steps of that one again.
    """
    kept: list[Attempt] = []
    for attempt in attempts:
        first = attempt.settled.first_rollout
        kept = [*(one for one in kept if one.settled.first_rollout < first), attempt]
    return kept


def append_weights(run: RunDir, sent: SentWeights) -> None:
    with best_effort(run.weights.name):
        _append(run.weights, asdict(sent))


def read_weights(path: Path) -> dict[int, SentWeights]:
    """Return the last record for each number of trained rollouts; a resumed run replaces what it trained again."""
    found: dict[int, SentWeights] = {}
    for line in _lines(path):
        try:
            sent = SentWeights(**parse_json(line))
            found[sent.step] = sent
        # The driver was killed while it wrote the last line, or the file is damaged.
        except (ValueError, TypeError, AttributeError):
            continue
    return found
