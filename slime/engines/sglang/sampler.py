"""Top-p and top-k of SGLang on a GPU: their kernels are compiled when the first request asks for them.

That takes more than a minute the first time on a machine. Until then the engine answers nobody, so it looks dead.
"""

from __future__ import annotations

from slime.engines.http import request_blocking
from slime.engines.process import ServerFailed


def warm_up(url: str, seconds: float) -> None:
    """One request with top-p and top-k.

    Raises:
        ServerFailed: it was not answered with 200 within ``seconds``.
    """
    cut_off = {"max_new_tokens": 1, "temperature": 1.0, "top_p": 0.9, "top_k": 2}
    try:
        body = {"input_ids": [0], "sampling_params": cut_off}
        status, answer = request_blocking("POST", f"{url}/generate", body, seconds)
    except OSError as error:
        raise ServerFailed(f"{url} did not answer its first request with top-p and top-k: {error!r}") from error
    if status != 200:
        said = answer.decode(errors="replace")[:500]
        raise ServerFailed(f"{url} cannot sample with top-p and top-k: {status} {said}")
