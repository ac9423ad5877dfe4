"""Warm up the top-p and top-k kernels of SGLang on a GPU, which are compiled at the first batch that needs them.

The first compilation on a machine takes more than a minute. Until then the engine answers no request, so a health
check would report it as dead.
"""

from __future__ import annotations

from slime.engines.http import request_blocking
from slime.engines.process import ServerFailed


def warm_up(url: str, seconds: float) -> None:
    """Send one request with top-p and top-k.

    Raises:
        ServerFailed: The engine did not answer with status 200 within ``seconds``.
    """
    cut_off = {"max_new_tokens": 1, "temperature": 1.0, "top_p": 0.9, "top_k": 2}
    try:
        body = {"input_ids": [0], "sampling_params": cut_off}
        status, answer = request_blocking("POST", f"{url}/generate", body, seconds)
    except OSError as error:
        raise ServerFailed(f"{url} did not answer its first request with top-p and top-k: {error!r}") from error
    if status != 200:
        said = answer.decode(errors="replace")[:500]
        advice = "--sglang-sampling-backend pytorch uses no kernels that must be compiled"
        raise ServerFailed(f"{url} cannot sample with top-p and top-k: {status} {said}; {advice}")
