"""The embedded engine: an inference server with SGLang's native HTTP interface, built on torch and
transformers.

``server.py`` starts the process, and is it. The main thread serves the aiohttp routes, and one other thread runs
the model (``engine.py``). ``scheduler.py`` selects the tokens of the next forward, ``runner.py``
computes them, and ``sampling.py`` samples from the logits. The rest of slime imports nothing from
here; clients use HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass

from slime.config.flag import Section, flag
from slime.registry import register


def torch_device(text: str) -> None:
    """Check the name of a device; raises a ValueError for one of another kind."""
    if text.partition(":")[0] not in ("cpu", "cuda"):
        raise ValueError(f"{text} must be cpu or cuda")


@dataclass
class EmbeddedFlags(Section):
    _title = "embedded engine"

    embedded_max_running_requests: int | None = flag(low=1)
    """Maximum number of requests that the embedded engine decodes at once. Default: 64; 256 on a GPU,
    if no layer is recurrent"""
    embedded_max_total_tokens: int | None = flag(low=1)
    """Tokens in the embedded engine's KV cache. Default: chosen by available memory"""
    embedded_device: str = flag(valid=torch_device)
    """Device of the embedded engine, cpu or cuda. Default: cuda if available"""


def parts() -> None:
    """Register the engine with its flags."""
    here = "slime.plugins.embedded"
    register("engine", "embedded", f"{here}.server:start", flags=EmbeddedFlags)
