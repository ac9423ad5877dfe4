"""Which generation of SGLang's HTTP surface a server speaks, and what it can therefore be asked."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from slime.engines.handle import Capabilities, EngineError


@dataclass(frozen=True)
class Surface:
    """One generation. A subclass or an instance with other values is all that another generation needs.

    Attributes:
        kind: ``"embedded"`` or ``"sglang"``.
    """

    kind: str
    capabilities: Capabilities


EMBEDDED = Surface(
    kind="embedded",
    capabilities=Capabilities(
        seeded_sampling=True,
        version_spans=True,
        release_while_busy=True,
        retract=True,
        update_brackets=True,
        named_checksums=True,
        weight_comparison=True,
    ),
)
SGLANG_0_5_23 = Surface(
    kind="sglang",
    capabilities=Capabilities(version_spans=True, retract=True, update_brackets=True, weight_comparison=True),
)
SGLANG_0_5_15 = Surface(kind="sglang", capabilities=Capabilities(weight_comparison=True))
"""No begin and end of an update. Its scheduler takes requests back on ``retract``, but asserts when weights or cache
change before they have run again, so it is never asked to: updates in flight abort, and go on with the tokens so far.
Its answers name one weight version; which token is of which is known from the requests that were sent again."""

_GENERATIONS: tuple[tuple[tuple[int, ...], Surface], ...] = (
    ((0, 5, 23), SGLANG_0_5_23),
    ((0, 5, 15), SGLANG_0_5_15),
)
"""(oldest version, surface), newest first. 0.5.15.post1 and 0.5.23 were looked at; a release between them counts as
the older generation."""


def choose_surface(server_info: dict[str, Any], url: str) -> Surface:
    """The surface for what ``/server_info`` says.

    Raises:
        EngineError: the version is older than any that is known.
    """
    version = str(server_info.get("version", ""))
    deterministic = bool(server_info.get("enable_deterministic_inference"))
    if server_info.get("engine") == "embedded":
        return replace(EMBEDDED, capabilities=replace(EMBEDDED.capabilities, deterministic=deterministic))
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    for oldest, surface in _GENERATIONS:
        if numbers >= oldest:
            compares = server_info.get("device") != "cpu"  # it calls torch.cuda
            return replace(surface, capabilities=replace(surface.capabilities, weight_comparison=compares))
    known = ".".join(map(str, _GENERATIONS[-1][0]))
    raise EngineError(f"{url} is SGLang {version or 'of unknown version'}; this slime speaks with {known} and later")
