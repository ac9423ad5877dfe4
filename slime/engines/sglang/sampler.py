"""Top-p and top-k of SGLang on a GPU: their kernels are compiled when the first request asks for them.

That takes more than a minute the first time on a machine. Until then the engine answers nobody, so it looks dead.
"""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import urlsplit

from slime.engines.plan import EngineSpec
from slime.engines.process import ServerFailed


def needs_warm_up(args: Any, spec: EngineSpec) -> bool:
    """Whether rollouts or evaluations, which go to the model that learns, draw from a part of the vocabulary; greedy
    requests do, beside others. Of servers that only prefill or decode none answers a plain request."""
    from slime.data.eval_config import resolve_eval_datasets

    if args.rollout_backend != "sglang" or not spec.updates or spec.worker_type != "regular":
        return False
    settings = [(args.rollout_temperature, args.rollout_top_p, args.rollout_top_k)]
    settings += [(config.temperature, config.top_p, config.top_k) for config in resolve_eval_datasets(args)]
    return any(temperature == 0 or (top_p or 1) < 1 or (top_k or -1) > 0 for temperature, top_p, top_k in settings)


def warm_up(url: str, seconds: float) -> None:
    """One request with top-p and top-k.

    Raises:
        ServerFailed: it was not answered with 200 within ``seconds``.
    """
    address = urlsplit(url)
    cut_off = {"max_new_tokens": 1, "temperature": 1.0, "top_p": 0.9, "top_k": 2}
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=seconds)
    try:
        body = json.dumps({"input_ids": [0], "sampling_params": cut_off})
        connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        said = answer.read().decode(errors="replace")
        if answer.status != 200:
            raise ServerFailed(f"{url} cannot draw with top-p and top-k: {answer.status} {said[:500]}")
    except (OSError, http.client.HTTPException) as error:
        raise ServerFailed(f"{url} did not answer its first request with top-p and top-k: {error!r}") from error
    finally:
        connection.close()
