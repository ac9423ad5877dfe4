"""Rank 0 of a process group that trainer and engines share, apart from the trainer's own groups.

The engines join through SGLang's ``/init_weights_update_group``: torch's TCP rendezvous under
``group_name``, then ``_new_process_group_helper``. Here the same keys are used on a backend object of its
own, so torch's default group, its registry and its communicators are never touched.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from slime.engines.flat import flatten, layout

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroupGloo, ProcessGroupNCCL, Store

    from slime.engines.flat import NamedTensor

T = TypeVar("T")
_NEVER = timedelta(days=1)  # NCCL's own watchdog would end this process; we abort the communicator instead


class Rendezvous:
    """The key-value store through which the members find each other; listens on one address only."""

    def __init__(self, address: str, world_size: int, deadline: float) -> None:
        from torch.distributed import TCPStore

        listener = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
        self.address, self.port = address, listener.getsockname()[1]
        self.world_size = world_size
        self.store: Store | None = TCPStore(
            address, self.port, world_size, True, timedelta(seconds=deadline),
            wait_for_workers=False, master_listen_fd=listener.detach(),
        )  # fmt: skip

    def release(self) -> None:
        """Stop listening: members that still look for each other get an error."""
        self.store = None


class BroadcastGroup:
    """Sends tensors to all members. Every method blocks: call it through :func:`in_thread`.

    Args:
        stall: gloo only; seconds after which one tensor that does not get through is an error.
    """

    def __init__(self, rendezvous: Rendezvous, name: str, backend: str, stall: float) -> None:
        from torch.distributed import PrefixStore

        self.name, self.backend = name, backend
        device = "cuda" if backend == "nccl" else "cpu"
        store = rendezvous.store
        assert store is not None, "the rendezvous was released"
        for prefix in (name, f"{name}/", f"{device}/"):
            store = PrefixStore(prefix, store)
        make = _nccl if backend == "nccl" else _gloo
        self._group: Any = make(store, rendezvous, stall)  # torch's stubs of the backends lack their collectives
        self._stream: torch.cuda.Stream | None = None

    def broadcast(self, tensors: Sequence[NamedTensor], flat: bool = False) -> None:
        """Send tensors in order; returns when all of it was sent. Raises what the backend raises.

        Args:
            flat: as one buffer of bytes without gaps, in one broadcast; otherwise in one broadcast per tensor.
        """
        import torch

        if self.backend != "nccl":
            self._launch(tensors, flat)
            return
        device = tensors[0][1].device
        with torch.cuda.device(device):
            self._stream = self._stream or torch.cuda.Stream(device)
            with torch.cuda.stream(self._stream):
                self._launch(tensors, flat)
            self._stream.synchronize()

    def _launch(self, tensors: Sequence[NamedTensor], flat: bool) -> None:
        import torch
        from torch.distributed import BroadcastOptions

        if flat:
            entries, size = layout(tensors, alignment=1)
            parts = [flatten(tensors, entries, size, torch.empty(size, dtype=torch.uint8, device=tensors[0][1].device))]
        else:
            parts = [tensor.detach().contiguous() for _, tensor in tensors]
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        works = [self._group.broadcast([part], options) for part in parts]
        for work in works:
            work.wait()

    def abort(self) -> None:
        """End what is under way on this communicator only. gloo has no such call: its ``stall`` ends it."""
        self._group.abort()

    def release(self) -> None:
        """Close the connections: members that still wait for a tensor get an error."""
        self._group = None


def _gloo(store: Store, rendezvous: Rendezvous, stall: float) -> ProcessGroupGloo:
    from torch.distributed import ProcessGroupGloo

    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=stall)
    # As the engines do, whatever the trainer's own groups do: a group crashes when its members differ in this.
    options._devices = [ProcessGroupGloo.create_device(hostname=rendezvous.address, lazy_init=False)]
    return ProcessGroupGloo(store, 0, rendezvous.world_size, options)


def _nccl(store: Store, rendezvous: Rendezvous, stall: float) -> ProcessGroupNCCL:
    from torch.distributed import ProcessGroupNCCL

    # As SGLang sets it: of two processes that differ one gets "invalid argument" at the first broadcast.
    os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
    options = ProcessGroupNCCL.Options()
    options._timeout = _NEVER
    return ProcessGroupNCCL(store, 0, rendezvous.world_size, options)


def in_thread(what: str, call: Callable[[], T]) -> asyncio.Future[T]:
    """Run a blocking call in a thread of its own that may be left behind, also at exit."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(outcome: Callable[[], None]) -> None:
        if not future.done():
            outcome()

    def work() -> None:
        try:
            result = call()
        except Exception as error:
            traceback.clear_frames(error.__traceback__)  # they would keep connections and buckets alive
            outcome = partial(future.set_exception, error)
        else:
            outcome = partial(future.set_result, result)
        with contextlib.suppress(RuntimeError):  # the loop is gone: nobody waits any more
            loop.call_soon_threadsafe(settle, outcome)

    threading.Thread(target=work, name=what, daemon=True).start()
    return future
