"""Actors that are processes of Ray's; see :mod:`slime.cluster.actors`."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from slime.cluster.actors import (
    OWN_THREADS,
    ActorError,
    ActorHandle,
    ActorLost,
    ActorProcess,
    Actors,
    NoAnswer,
    NotEnded,
    Place,
    Ref,
)

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer
    from ray.util.placement_group import PlacementGroup

T = TypeVar("T")


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """Raise Ray's own errors as those of :mod:`slime.cluster.actors`. What a method has raised is
    left as it is.
    """
    from ray import exceptions

    try:
        yield
    except exceptions.RayTaskError:  # also an instance of the class that the method has raised
        raise
    except exceptions.GetTimeoutError as error:
        raise NoAnswer(str(error)) from error
    except (exceptions.RayActorError, exceptions.ObjectLostError) as error:
        raise ActorLost(str(error)) from error
    except exceptions.RayError as error:
        raise ActorError(f"{type(error).__name__}: {error}") from error


class RayActors(Actors):
    """Each actor is a process of a Ray cluster: one that the user has started, or a private one."""

    # --- the cluster ---------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        import ray

        return bool(ray.is_initialized())

    def connect(self) -> None:
        from slime.plugins.actors.ray_cluster import connect

        connect()

    def disconnect(self) -> None:
        from slime.plugins.actors.ray_cluster import disconnect

        disconnect()

    def resources(self) -> Mapping[str, float]:
        import ray

        return dict(ray.cluster_resources())

    def report(self) -> str:
        import ray

        total = ray.cluster_resources()
        parts = [
            f"{name} {ray.available_resources().get(name, 0):g} of {total[name]:g} free"
            for name in ("CPU", "GPU")
            if name in total
        ]
        return f"Ray: {self.nodes()} node(s) alive; {', '.join(parts)}"

    def nodes(self) -> int:
        import ray

        return sum(bool(node["Alive"]) for node in ray.nodes())

    def node(self) -> str:
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def address(self) -> str:
        import ray

        return str(ray.util.get_node_ip_address())

    def log_to(self, folder: Path, name: str) -> None:
        redirect_output(folder, name)

    def own_gpus(self) -> Sequence[int]:
        import ray

        return [int(gpu) for gpu in ray.get_gpu_ids()]

    def reserve(self, bundle: Mapping[str, float], count: int, spread: bool) -> RayBundles:
        from ray.util.placement_group import placement_group

        return RayBundles(
            placement_group([dict(bundle)] * count, strategy="SPREAD" if spread else "PACK")
        )

    # --- actors and their results --------------------------------------------------------------

    def create(
        self,
        cls: type,
        *arguments: object,
        options: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        threads: int | None = None,
        own_threads: bool = False,
        spread: bool = False,
    ) -> ActorHandle:
        import ray

        taken: dict[str, Any] = {"num_cpus": 0, **(options or {})}
        if environment is not None:
            taken["runtime_env"] = {"env_vars": dict(environment)}
        if spread:
            taken["scheduling_strategy"] = "SPREAD"
        if threads is not None:
            taken["max_concurrency"] = threads
        actor_class: Any = _with_own_threads(cls) if own_threads else ray.remote(cls)
        handle: ActorHandle = actor_class.options(**taken).remote(*arguments)
        return handle

    def kill(self, actor: ActorHandle) -> None:
        import ray

        with _translated():
            ray.kill(actor)  # type: ignore[arg-type]  # it is one of Ray's handles

    def end_processes(self, processes: Sequence[ActorProcess], seconds: float) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        here = self.node()
        left: list[int] = []
        for node in dict.fromkeys(process.node for process in processes):
            there = [process for process in processes if process.node == node]
            if node == here:
                left += _end_here(there, seconds)
                continue
            strategy = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
            ending = ray.remote(_end_here).options(num_cpus=0, scheduling_strategy=strategy)
            left += list(self.get([ending.remote(there, seconds)], timeout=2 * seconds)[0])
        if left:
            raise NotEnded(f"processes {', '.join(map(str, left))} do not end after SIGKILL")

    def put(self, value: T) -> Ref[T]:
        import ray

        return ray.put(value)

    def get(self, refs: Sequence[Ref[T]], timeout: float | None = None) -> list[T]:
        import ray

        with _translated():
            ray_refs: Any = list(refs)
            return list(ray.get(ray_refs, timeout=timeout))

    def wait(self, refs: Sequence[Ref[T]], timeout: float) -> tuple[list[Ref[T]], list[Ref[T]]]:
        import ray

        pending: Any = list(refs)
        with _translated():
            return ray.wait(pending, num_returns=len(pending), timeout=timeout)

    async def result(self, ref: Ref[T]) -> T:
        with _translated():
            result: T = await asyncio.wrap_future(ref.future())
        return result


def _with_own_threads(cls: type) -> Any:
    """The Ray actor class of ``cls``, with a concurrency group of one thread for each of
    :data:`OWN_THREADS`.
    """
    import ray

    names = [name for name in OWN_THREADS if hasattr(cls, name)]
    aside = {name: ray.method(concurrency_group=name)(getattr(cls, name)) for name in names}
    make: Callable[[type], Any] = ray.remote(concurrency_groups=dict.fromkeys(names, 1))  # type: ignore[call-overload]
    return make(type(cls.__name__, (cls,), aside))


def _end_here(processes: Sequence[ActorProcess], seconds: float) -> list[int]:
    """Kill processes of this node with their children; returns the ids of those that still run
    after ``seconds``.
    """
    import psutil

    from slime.engines.process import wait_gone

    killed: list[psutil.Process] = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(process.pid)
            if abs(root.create_time() - process.started) < 0.1:
                killed += [*root.children(recursive=True), root]
    # Ray tells of a process that ends before Ray itself has killed it as of a crash.
    for each in wait_gone(killed, 1.0):
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    return [each.pid for each in wait_gone(killed, seconds)]


class RayBundles:
    """A placement group."""

    def __init__(self, group: PlacementGroup) -> None:
        self._group = group

    def wait(self, seconds: float) -> bool:
        return bool(self._group.wait(timeout_seconds=seconds))

    def options(self, index: int, gpus: float, cpus: float) -> Mapping[str, Any]:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(
            placement_group=self._group, placement_group_bundle_index=index
        )
        return {"num_gpus": gpus, "num_cpus": cpus, "scheduling_strategy": strategy}

    def places(self, count: int, seconds: float) -> list[Place]:
        import ray

        # Ray does not tell which GPU a bundle has, so a small task in each bundle looks it up.
        where: Any = ray.remote(_where)
        refs = [where.options(**self.options(index, 1, 1)).remote() for index in range(count)]
        places = []
        for bundle, (address, gpu) in enumerate(RayActors().get(refs, timeout=seconds)):
            node = (
                tuple(int(part) for part in address.split(".")) if address.count(".") == 3 else (0,)
            )
            places.append(Place(node, gpu, bundle, address))
        return places

    def remove(self) -> None:
        from ray.util.placement_group import remove_placement_group

        with _translated():
            remove_placement_group(self._group)


def _where() -> tuple[str, int]:
    """Address of the node and number of the GPU of this task."""
    import ray

    return ray.util.get_node_ip_address(), int(ray.get_gpu_ids()[0])


class _LogFile(io.RawIOBase):
    """A file descriptor whose writes never fail: on a full disk, the output is lost, but the run
    continues.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def fileno(self) -> int:
        return self._descriptor

    def writable(self) -> bool:
        return True

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return os.write(self._descriptor, data)
        except OSError:
            return memoryview(data).nbytes


def _stream(descriptor: int) -> io.TextIOWrapper:
    return io.TextIOWrapper(
        io.BufferedWriter(_LogFile(descriptor)),
        encoding="utf-8",
        errors="backslashreplace",
        line_buffering=True,
    )


def redirect_output(log_dir: Path, name: str) -> None:
    """Send stdout and stderr of this process, including those of C libraries, to
    ``log_dir/name.log``.

    ``print`` does not fail on a full disk, not even in users' functions.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    path = log_dir / f"{name}.log"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout = _stream(1)
    sys.stderr = _stream(2)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s", force=True
    )
