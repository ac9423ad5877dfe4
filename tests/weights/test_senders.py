"""Several training ranks that broadcast at the same time, each to its own engines; one that dies on
the way.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from quick_processes import start_ranks
from real_engines import Engines, named_weights, new_model, save_tiny_model, sync_settings

from slime.engines.handle import EngineHandle
from slime.engines.process import free_port
from slime.models.digest import tensor_digest
from slime.utils.async_utils import run

pytestmark = [pytest.mark.real, pytest.mark.slow]
DIES_AT = 5  # tensors


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[EngineHandle]]:
    made = Engines(
        save_tiny_model(tmp_path_factory.mktemp("tiny")), tmp_path_factory.mktemp("logs")
    )
    yield made.start(3)
    made.stop()


def _rank(
    rank: int, port: int, urls: list[str], version: str, seed: int, dies: bool, output: str
) -> None:
    """One training rank: its weights are shards, which all ranks gather, and both ranks send."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from slime.backends import collectives
    from slime.weights.sync import sync_weights
    from slime.weights.transports import create_transport, ranks_of_engines

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    collectives.BATCH_BYTES = 4096  # so that much is still to be gathered when one of them dies
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    shards = [
        (name, distribute_tensor(t.detach(), mesh, [Shard(0)]))
        for name, t in named_weights(new_model(seed))
    ]
    settings = sync_settings(update_weight_senders=2)
    ranks = ranks_of_engines(settings, urls, {}, 2, same_host=False)
    mine = [EngineHandle(url) for url in urls if ranks[url][0] == rank]

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for index, pair in enumerate(collectives.whole_tensors(shards)):
            if dies and rank == 1 and index == DIES_AT:
                os.kill(os.getpid(), signal.SIGKILL)
            yield pair

    transport = create_transport(settings, colocated_host=False)
    report = sync_weights(settings, weights(), mine, transport, version, is_sender=bool(mine))
    assert report is not None and transport.name == "distributed"
    torch.save({"engines": len(mine), "tensors": report.tensors}, f"{output}/rank{rank}.pt")
    run(transport.close())
    dist.destroy_process_group()


def send(urls: list[str], version: str, seed: int, output: Path, dies: bool = False) -> Any:
    context = start_ranks(_rank, (free_port(), urls, version, seed, dies, str(output)), 2)
    assert context is not None
    return context


def holds(engine: EngineHandle, seed: int, version: str) -> bool:
    sent = {name: tensor_digest(tensor.detach()) for name, tensor in named_weights(new_model(seed))}
    held = run(engine.checksum())
    return run(engine.info()).weight_version == version and all(
        held[name] == value for name, value in sent.items()
    )


def test_every_engine_gets_the_same_from_whichever_sender(
    engines: list[EngineHandle], tmp_path: Path
) -> None:
    send([engine.url for engine in engines], "0.1", 31, tmp_path).join()
    reports = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]
    count = len(named_weights(new_model(31)))
    assert reports == [{"engines": 2, "tensors": count}, {"engines": 1, "tensors": count}]
    assert all(holds(engine, 31, "0.1") for engine in engines)


def test_the_end_of_a_sender_ends_the_others_too(
    engines: list[EngineHandle], tmp_path: Path
) -> None:
    context = send([engine.url for engine in engines], "0.2", 32, tmp_path, dies=True)
    for process in context.processes:
        process.join(120)
    codes = [process.exitcode for process in context.processes]
    for process in context.processes:
        process.kill()
    assert codes == [1, -signal.SIGKILL], "the other sender does not wait for it"
    assert not (tmp_path / "rank0.pt").exists()
    assert not any(holds(engine, 32, "0.2") for engine in engines), (
        "no engine takes a part for the whole"
    )
