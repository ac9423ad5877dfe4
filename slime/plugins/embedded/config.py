"""The flags of the embedded engine."""

from __future__ import annotations

from dataclasses import dataclass

from slime.config.flag import Section, flag


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
