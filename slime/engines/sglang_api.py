"""SGLang's native HTTP interface as values: what engines can do, say of themselves and receive, and its versions.

An engine is an HTTP server that speaks this interface; the embedded engine speaks its newest version. Callers look at
:class:`Capabilities` instead of asking which engine answers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

PauseMode = Literal["abort", "retract", "in_place"]
"""``abort``: running requests end with the tokens that they have. ``retract``: they wait, and their KV cache is
computed again. ``in_place``: they wait, and continue with the KV cache of the old weights."""

MemoryTag = Literal["weights", "kv_cache", "cuda_graph"]

DELTA_LOADER = "slime.weights.delta_loader.load"
"""The loader that ``load_format`` names when a tensor update is a request to load a published delta. It is a string
because SGLang's server process imports it (``--custom-weight-loader``)."""


@dataclass(frozen=True)
class Capabilities:
    """What an engine can do beyond plain generation; contract tests are marked by these names."""

    seeded_sampling: bool = False  # the same sampling_seed gives the same tokens
    deterministic: bool = False  # a request's result does not depend on the rest of the batch
    version_spans: bool = False  # meta_info.weight_versions, per token
    release_while_busy: bool = False
    retract: bool = False
    update_brackets: bool = False  # tensor updates stand between begin and end
    named_checksums: bool = False  # checksums under Hugging Face names
    weight_comparison: bool = False  # check_weights: snapshot and compare
    flat_broadcast: bool = False  # receives all tensors of a bucket in one broadcast


class EngineError(RuntimeError):
    """An engine answered with an error or not at all; the message names engine, call and answer."""


@dataclass(frozen=True)
class EngineInfo:
    """What an engine says of itself."""

    kind: str  # "embedded" or "sglang"
    version: str  # of the server software
    model_path: str
    weight_version: str
    dtype: str
    tensor_parallel_size: int = 1
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Broadcast:
    """What engines receive of one bucket over a process group: the same for all of them.

    Attributes:
        dtypes: ``"bfloat16"``.
        flat: one broadcast of all tensors' bytes end to end, without gaps. Otherwise one broadcast per tensor.
    """

    names: Sequence[str]
    dtypes: Sequence[str]
    shapes: Sequence[Sequence[int]]
    group_name: str
    weight_version: str
    flat: bool = False

    @cached_property
    def body(self) -> bytes:
        """JSON for ``/update_weights_from_distributed``, made once for all engines."""
        import orjson

        body: dict[str, object] = {
            "names": list(self.names),
            "dtypes": list(self.dtypes),
            "shapes": [list(shape) for shape in self.shapes],
            "group_name": self.group_name,
            "flush_cache": False,
            "weight_version": self.weight_version,
        }
        if self.flat:
            body["load_format"] = "flattened_bucket"
        return orjson.dumps(body)


@dataclass(frozen=True)
class ApiVersion:
    """One version of the HTTP interface.

    Attributes:
        kind: ``"embedded"`` or ``"sglang"``.
    """

    kind: str
    capabilities: Capabilities


EMBEDDED = ApiVersion(
    kind="embedded",
    capabilities=Capabilities(
        seeded_sampling=True,
        version_spans=True,
        release_while_busy=True,
        retract=True,
        update_brackets=True,
        named_checksums=True,
        weight_comparison=True,
        flat_broadcast=True,
    ),
)
SGLANG_0_5_23 = ApiVersion(
    kind="sglang",
    capabilities=Capabilities(
        version_spans=True, retract=True, update_brackets=True, weight_comparison=True, flat_broadcast=True
    ),
)
SGLANG_0_5_15 = ApiVersion(kind="sglang", capabilities=Capabilities(weight_comparison=True))
"""No begin and end of an update. Its scheduler takes requests back on ``retract``, but asserts when weights or cache
change before they have run again, so it is never asked to: updates in flight abort, and go on with the tokens so far.
Its answers name one weight version; which token is of which is known from the requests that were sent again."""

_API_VERSIONS: tuple[tuple[tuple[int, ...], ApiVersion], ...] = (
    ((0, 5, 23), SGLANG_0_5_23),
    ((0, 5, 15), SGLANG_0_5_15),
)
"""(oldest release, API version), newest first. 0.5.15.post1 and 0.5.23 were examined; a release between them counts as
the older one."""


def choose_api_version(server_info: Mapping[str, object], url: str) -> ApiVersion:
    """The API version for what ``/server_info`` says.

    Raises:
        EngineError: the version is older than any that is known.
    """
    version = str(server_info.get("version", ""))
    deterministic = bool(server_info.get("enable_deterministic_inference"))
    if server_info.get("engine") == "embedded":
        return replace(EMBEDDED, capabilities=replace(EMBEDDED.capabilities, deterministic=deterministic))
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    for oldest, api in _API_VERSIONS:
        if numbers >= oldest:
            compares = server_info.get("device") != "cpu"  # it calls torch.cuda
            return replace(api, capabilities=replace(api.capabilities, weight_comparison=compares))
    known = ".".join(map(str, _API_VERSIONS[-1][0]))
    raise EngineError(f"{url} is SGLang {version or 'of unknown version'}; this slime supports {known} and later")
