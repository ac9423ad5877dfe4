"""Types for SGLang's native HTTP interface: the capabilities of engines, their description, and the
API versions.

An engine is an HTTP server with this interface. The embedded engine serves its newest version.
Callers check :class:`Capabilities` and do not depend on the kind of the engine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal

PauseMode = Literal["abort", "retract", "in_place"]
"""What a pause does to running requests. ``abort``: they end with the tokens generated so far.
``retract``: they wait, and their KV cache is computed again with the new weights. ``in_place``:
they wait, and continue with the KV cache of the old weights."""

MemoryTag = Literal["weights", "kv_cache", "cuda_graph"]


@dataclass(frozen=True)
class Capabilities:
    """What an engine supports in addition to plain generation. The markers of the contract tests
    use these names.
    """

    seeded_sampling: bool = False  # the same sampling_seed gives the same tokens
    deterministic: bool = False  # a request's result does not depend on the rest of the batch
    version_spans: bool = False  # meta_info.weight_versions gives the weight version of each token
    release_while_busy: bool = False  # memory can be released while requests run
    retract: bool = False  # the pause mode "retract" can be used for weight updates
    update_brackets: bool = False  # a tensor update has calls to begin and end it
    named_checksums: bool = False  # checksums have the Hugging Face names of the tensors
    weight_comparison: bool = False  # check_weights can take a snapshot and compare with it
    flat_broadcast: bool = False  # all tensors of a bucket can be sent in one broadcast
    adapters: bool = False  # an update can consist of the factors of an adapter (LoRA) only
    named_adapters: bool = False  # adapters are loaded by a name, which requests give as lora_path
    # an adapter is compared with the sender's digests before it is loaded
    adapter_digests: bool = False
    plain_handles: bool = False  # tensors come as JSON with handles, not as pickles
    # each load of an adapter gets a new id, which is part of the keys of the KV cache
    adapter_cache_keys: bool = False


class EngineError(RuntimeError):
    """An engine answered with an error or not at all. The message names the engine, the call and
    the response.
    """


@dataclass(frozen=True)
class EngineInfo:
    """The description of an engine, from ``/server_info`` and ``/model_info``."""

    kind: str  # the engine's name, such as "embedded" or "sglang"
    version: str  # of the server software
    model_path: str
    weight_version: str
    dtype: str
    tensor_parallel_size: int = 1
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Broadcast:
    """The request to receive one bucket over a process group. It is the same for all engines.

    Attributes:
        dtypes: The dtypes without the prefix ``torch.``, for example ``"bfloat16"``.
        flat: Whether there is one broadcast with the bytes of all tensors, without gaps. Otherwise
            there is one broadcast per tensor.
    """

    names: Sequence[str]
    dtypes: Sequence[str]
    shapes: Sequence[Sequence[int]]
    group_name: str
    weight_version: str
    flat: bool = False

    @cached_property
    def body(self) -> bytes:
        """The JSON body for ``/update_weights_from_distributed``. It is encoded once and sent to
        all engines.
        """
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
        kind: The name of the engine, such as ``"embedded"`` or ``"sglang"``.
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
        adapters=True,
        named_adapters=True,
        plain_handles=True,
    ),
)
SGLANG_0_5_23 = ApiVersion(
    kind="sglang",
    capabilities=Capabilities(
        version_spans=True,
        retract=True,
        update_brackets=True,
        weight_comparison=True,
        flat_broadcast=True,
        adapter_digests=True,
        adapter_cache_keys=True,
    ),
)
SGLANG_0_5_15 = ApiVersion(
    kind="sglang", capabilities=Capabilities(weight_comparison=True, adapter_cache_keys=True)
)
"""This version has no calls to begin and end an update. Its scheduler supports ``retract``, but an
assertion in it fails if weights or cache change before retracted requests have run again. So none
of them stays: an update in flight aborts the requests, and the client continues them with the
tokens generated so far. A response names only one weight version, so the version of each token is
derived from the requests that were sent again."""

_API_VERSIONS: tuple[tuple[tuple[int, ...], ApiVersion], ...] = (
    ((0, 5, 23), SGLANG_0_5_23),
    ((0, 5, 15), SGLANG_0_5_15),
)
"""The oldest release of each API version, newest first. Only 0.5.15.post1 and 0.5.23 were examined.
A release between them is treated like the older one."""


def choose_api_version(server_info: Mapping[str, object], url: str) -> ApiVersion:
    """Return the API version of an engine from its ``/server_info``.

    An engine other than SGLang names itself in ``engine``, and in ``capabilities`` those of
    :class:`Capabilities` that it has.

    Raises:
        EngineError: The engine is older than all supported versions.
    """
    version = str(server_info.get("version", ""))
    deterministic = bool(server_info.get("enable_deterministic_inference"))
    if server_info.get("engine") == "embedded":
        return replace(
            EMBEDDED, capabilities=replace(EMBEDDED.capabilities, deterministic=deterministic)
        )
    if (kind := server_info.get("engine")) is not None:
        told = server_info.get("capabilities")
        names = {one.name for one in fields(Capabilities)} & set(
            told if isinstance(told, list) else ()
        )
        return ApiVersion(str(kind), Capabilities(**dict.fromkeys(names, True)))
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    for oldest, api in _API_VERSIONS:
        if numbers >= oldest:
            compares = server_info.get("device") != "cpu"  # SGLang's comparison calls torch.cuda
            named = bool(server_info.get("enable_lora"))
            return replace(
                api,
                capabilities=replace(
                    api.capabilities, weight_comparison=compares, named_adapters=named
                ),
            )
    known = ".".join(map(str, _API_VERSIONS[-1][0]))
    raise EngineError(
        f"{url} is SGLang {version or 'of unknown version'}; this slime supports {known} and later"
    )
