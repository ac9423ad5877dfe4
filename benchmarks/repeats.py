"""Whether training steps repeat bit for bit: digests of log-probs, metrics and weights.

    python benchmarks/repeats.py --shape qwen3-0.6b -- --deterministic     # twice: the same digests?

The model, the batch and the flags are those of ``train_mfu.py``: a log-prob pass and four steps of
one rank. The last line is JSON, with the seconds of the last step.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Iterable
from typing import Any

import train_mfu
from random_model import make_config, write_model

STEPS = 4


def digest(tensors: Iterable[Any]) -> str:
    """Return the first 16 digits of SHA-256 over the bytes of tensors of any dtype."""
    import torch

    whole = hashlib.sha256()
    for tensor in tensors:
        whole.update(tensor.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return whole.hexdigest()[:16]


def measure(options: Any, rest: list[str]) -> dict[str, object]:
    from slime.backends.advantages import AdvantageSettings, compute_advantages
    from slime.backends.create import create_backend

    args = train_mfu.make_args(options, rest, 1)
    backend: Any = create_backend(args, "actor", 0, 1, "127.0.0.1", train_mfu._free_port(), 0)
    batch = train_mfu.make_batch(options, make_config(options.shape).vocab_size, 0, 1)
    compute_advantages(AdvantageSettings.from_args(args), batch, backend.reduce)
    scores = backend.log_probs(batch)
    metrics: list[object] = []
    seconds = 0.0
    for _ in range(STEPS):
        step = lambda: metrics.append(backend.train_step(batch, 0))  # noqa: E731 - what is timed
        seconds = train_mfu.timed(step, backend.device)
    return {
        "flags": rest,
        "log_probs": digest(scores if isinstance(scores, list) else next(iter(scores.values()))),
        "metrics": hashlib.sha256(repr(metrics).encode()).hexdigest()[:16],
        "weights": digest(parameter for _, parameter in backend.named_parameters),
        "seconds": round(seconds, 3),
    }


def main() -> None:
    options, rest = train_mfu.parse_options()
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    write_model(options.shape, options.model, weights=True)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        result = measure(options, rest)
    # torch names here what has no deterministic form.
    result["warnings"] = sorted({str(w.message)[:80] for w in seen if "determin" in str(w.message)})
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
