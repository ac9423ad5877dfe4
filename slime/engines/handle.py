"""What the rest of slime may ask of one inference engine.

An engine is an HTTP server that speaks SGLang's native surface. One adapter class per
generation of that surface implements :class:`EngineHandle`; the embedded engine speaks the
newest generation, so it needs none of its own. Callers look at :class:`Capabilities` instead
of asking which engine answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from slime.weights.update import Bucket

PauseMode = Literal["abort", "retract", "in_place"]
"""``abort``: running requests end with what they have. ``retract``: they wait and their KV is
computed again. ``in_place``: they wait and go on with the KV of the old weights."""

MemoryTag = Literal["weights", "kv_cache", "cuda_graph"]

DELTA_LOADER = "slime.weights.delta_loader.load"
"""What ``load_format`` names where a tensor update is a request to load a published delta, also in SGLang
(``--custom-weight-loader``)."""


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


@runtime_checkable
class EngineHandle(Protocol):
    """One engine. All calls raise :class:`EngineError` with a deadline of their own; none waits for ever."""

    url: str  # http://host:port

    @property
    def capabilities(self) -> Capabilities: ...

    async def generate(self, request: dict[str, Any]) -> Any:
        """POST /generate. Returns the decoded answer: a dict, or a list for a batch."""

    async def health(self, timeout: float = 30.0) -> bool:
        """True when the engine produced a token within ``timeout`` seconds."""

    async def info(self) -> EngineInfo: ...

    async def load(self) -> dict[str, Any]:
        """Running and waiting requests, tokens in use."""

    async def abort(self, request_id: str | None = None) -> None:
        """End one request, or all when ``request_id`` is None; they answer with what they have."""

    async def pause(self, mode: PauseMode) -> None: ...

    async def continue_generation(self) -> None: ...

    async def flush_cache(self) -> None: ...

    async def begin_update(self) -> None:
        """Open a weight update; a no-op where the engine knows no brackets."""

    async def push(self, bucket: Bucket, weight_version: str, others: Sequence[str] = ()) -> None:
        """Hand over one bucket by shared memory (CPU) or IPC handle (CUDA); same host only.

        ``others``: what training ranks on the engine's other GPUs offer, see
        :func:`slime.engines.tensor_payload.payload`."""

    async def end_update(self, weight_version: str) -> None:
        """Close the update: from here on answers carry ``weight_version``."""

    async def init_group(
        self, address: str, port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> None:
        """Join a process group with the trainer; rank 0 is the sender."""

    async def receive(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group_name: str,
        weight_version: str,
    ) -> None:
        """Take part in one broadcast per tensor, in the order given."""

    async def destroy_group(self, group_name: str) -> None: ...

    async def load_from_disk(self, path: str, weight_version: str) -> None: ...

    async def call_loader(self, loader: str, request: str) -> None:
        """Let the engine call ``loader(model, [(request, empty tensor)])``, an import path that it was started
        with as ``--custom-weight-loader``; within an update. The version keeps its name until the update ends."""

    async def release(self, tags: Sequence[MemoryTag] = ()) -> None:
        """Give accelerator memory back; no tags means all."""

    async def resume(self, tags: Sequence[MemoryTag] = ()) -> None: ...

    async def checksum(self) -> dict[str, str]:
        """Digest per tensor, by the names that the engine uses (see ``named_checksums``)."""

    async def check_weights(self, action: Literal["snapshot", "reset_tensors", "compare"]) -> None:
        """POST /weights_checker: keep a copy of all tensors, overwrite them, or compare them with the copy.
        A difference is an :class:`EngineError` that carries the engine's message."""

    async def close(self) -> None:
        """Close the connections of this handle; the engine itself runs on."""
