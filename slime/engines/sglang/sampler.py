"""Top-p and top-k of SGLang on a GPU: their kernels are compiled when the first request asks for them.

That takes more than a minute the first time on a machine. Until then the engine answers nobody, so it looks dead.
"""

from __future__ import annotations

import http.client
import json
from urllib.parse import urlsplit

from slime.engines.process import ServerFailed


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
