"""What engines say about themselves before an update, and what follows from it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from slime.config.engine import OUTER_CACHE, outer_caches
from slime.engines.sglang_api import EngineError, EngineInfo

if TYPE_CHECKING:
    import torch

    from slime.engines.handle import EngineHandle


async def describe(engine: EngineHandle) -> EngineInfo:
    """Return the description of an engine that can be updated.

    Raises:
        EngineError: The engine does not answer, or its KV cache would outlive the update. slime starts no such server,
            but external engines are started by others.
    """
    info = await engine.info()
    if given := outer_caches(info.extra):
        raise EngineError(f"{engine.url} was started with {given[0]}: {OUTER_CACHE}: start it without")
    return info


def engine_dtype(infos: Iterable[EngineInfo], rollout_dtype: str | None) -> torch.dtype | None:
    """Return the dtype of the weights on all engines.

    If the engines have different dtypes or do not report them, it is ``--rollout-dtype``. None means that tensors are
    sent without a cast.
    """
    import torch

    said = {info.dtype.removeprefix("torch.") for info in infos}
    name = said.pop() if len(said) == 1 else None
    dtype = getattr(torch, name, None) if name else None
    if not isinstance(dtype, torch.dtype):
        dtype = getattr(torch, rollout_dtype) if rollout_dtype else None
    return dtype
