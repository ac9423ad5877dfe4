"""Rank 0 of a process group of trainer and engines, which is separate from the trainer's own groups.

The engines join with SGLang's ``/init_weights_update_group``, which makes torch's TCP rendezvous with ``group_name`` as
a prefix and calls ``_new_process_group_helper``. Here the same keys are used with a separate backend object, so that
torch's default group, its registry and its communicators are not affected.
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

from slime.engines.payload import flatten, layout

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroupGloo, ProcessGroupNCCL, Store

    from slime.engines.payload import NamedTensor

T = TypeVar("T")
_NEVER = timedelta(days=1)  # NCCL's watchdog would end this process; slime aborts the communicator itself instead


class Rendezvous:
    """The key-value store with which the members find each other. It listens on one address only."""

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
        """Stop listening, so that members that are still joining get an error."""
        self.store = None


class BroadcastGroup:
    """Sends tensors to all members. Every method blocks, so it must be called with :func:`in_thread`.

    Args:
        stall: With gloo, the time limit in seconds for sending one tensor.
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
        """Send tensors in order, and return when all of them were sent. Errors of the backend propagate.

        Args:
            flat: Whether to send the bytes of all tensors in one broadcast, without gaps. Otherwise there is one
                broadcast per tensor.
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
        """Abort the operations of this communicator only. Only NCCL has this; with gloo, ``stall`` limits the time."""
        self._group.abort()

    def release(self) -> None:
        """Close the connections, so that members that still wait for a tensor get an error."""
        self._group = None


def _gloo(store: Store, rendezvous: Rendezvous, stall: float) -> ProcessGroupGloo:
    from torch.distributed import ProcessGroupGloo

    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=stall)
    # lazy_init must be as on the engines, whatever the trainer's own groups use: a group crashes if its members differ.
    options._devices = [ProcessGroupGloo.create_device(hostname=rendezvous.address, lazy_init=False)]
    return ProcessGroupGloo(store, 0, rendezvous.world_size, options)


def _nccl(store: Store, rendezvous: Rendezvous, stall: float) -> ProcessGroupNCCL:
    from torch.distributed import ProcessGroupNCCL

    # This must be as in SGLang. If two processes differ, one gets "invalid argument" at the first broadcast.
    os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
    options = ProcessGroupNCCL.Options()
    options._timeout = _NEVER
    return ProcessGroupNCCL(store, 0, rendezvous.world_size, options)


def in_thread(what: str, call: Callable[[], T]) -> asyncio.Future[T]:
    """Run a blocking call in its own daemon thread, which does not delay the exit of the process if it hangs."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(outcome: Callable[[], None]) -> None:
        if not future.done():
            outcome()

    def work() -> None:
        try:
            result = call()
        except Exception as error:
            traceback.clear_frames(error.__traceback__)  # the frames would keep connections and buckets alive
            outcome = partial(future.set_exception, error)
        else:
            outcome = partial(future.set_result, result)
        with contextlib.suppress(RuntimeError):  # the loop is closed, so nobody waits for the result
            loop.call_soon_threadsafe(settle, outcome)

    threading.Thread(target=work, name=what, daemon=True).start()
    return future
