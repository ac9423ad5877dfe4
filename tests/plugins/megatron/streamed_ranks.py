"""What the ranks of ``test_streamed_gradients.py`` run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def compare(rank: int, ports: Any, path: Path, megatron: dict[str, Any]) -> None:
    """Two optimizer steps with gradients copied in pieces and at once: the same norms and
    weights.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    from megatron_ranks import leave_groups

    from slime.plugins.megatron import optimizer

    optimizer.PIECE_BYTES = 4096
    found = []
    for number, clip in enumerate((1e9, 1e9, 1e-3, 1e-3)):
        found.append(
            two_steps(rank, ports.get(number), path, megatron, clip, streamed=number % 2 == 0)
        )
        leave_groups()
    for in_pieces, at_once in ((found[0], found[1]), (found[2], found[3])):
        for a, b in zip(in_pieces["norms"], at_once["norms"], strict=True):
            assert abs(a - b) <= 1e-5 * b, (a, b)
        for one, other in zip(in_pieces["moments"], at_once["moments"], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-3 * float(other.abs().max()))
    for name, tensor in found[1]["weights"].items():
        assert torch.equal(found[0]["weights"][name], tensor), name
    # clipped by norms that were summed in another order
    for name, tensor in found[3]["weights"].items():
        torch.testing.assert_close(found[2]["weights"][name], tensor, rtol=1e-2, atol=1e-5)
    assert any(
        not torch.equal(tensor, found[0]["loaded"][name])
        for name, tensor in found[0]["weights"].items()
    )


def two_steps(
    rank: int, port: int, path: Path, megatron: dict[str, Any], clip: float, streamed: bool
) -> Any:
    import torch
    from fsdp_helpers import make_args
    from megatron_ranks import rank_batch

    from slime.backends.create import create_backend
    from slime.backends.train_loop import train_on_rollout

    args = make_args(
        path,
        train_backend="megatron",
        world_size=2,
        train_dtype="bfloat16",
        clip_grad=clip,
        lr=1e-3,
    )
    args.megatron = {"grad_reduce_in_bf16": True, **megatron}
    if not streamed:
        args.megatron.pop("optimizer_cpu_offload", None)
    backend: Any = create_backend(args, "actor", rank, 2, "127.0.0.1", port)
    assert len(backend.optimizer.streamed) == len(backend.optimizer.chained.chained_optimizers)
    assert sum(len(one.pieces) for one in backend.optimizer.streamed) > 4
    if not streamed:
        backend.optimizer.streamed = []
    loaded = {name: tensor.clone() for name, tensor in backend.named_weights()}
    batches = [
        rank_batch(seed, 0, backend.data_parallel_rank, backend.data_parallel_size)
        for seed in (0, 3)
    ]
    norms = [train_on_rollout(backend, batch)[0]["train/grad_norm"] for batch in batches]
    moments = [state["exp_avg"].clone() for state in backend.optimizer.states()]
    steps = {float(state["step"]) for state in backend.optimizer.states()}
    assert steps == {2.0}, steps  # each update is made once, in however many pieces
    weights = {name: tensor.clone() for name, tensor in backend.named_weights()}
    mains = [kept["parameter"].clone() for kept in backend.optimizer.kept()]
    backend.reset_optimizer()
    for kept, main in zip(backend.optimizer.kept(), mains, strict=True):
        assert torch.equal(kept["parameter"], main)
        assert (
            not kept["exp_avg"].any()
            and not kept["exp_avg_sq"].any()
            and float(kept["step"]) == 0.0
        )
    return {"norms": norms, "moments": moments, "weights": weights, "loaded": loaded}


def moved_shares(rank: int, ports: Any, path: Path) -> None:
    """The default moves every main parameter into memory of its own; a fraction moves about as much
    of them. Nothing keeps those alive that were replaced: on a GPU they would take four bytes a
    parameter."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import gc
    import weakref

    from fsdp_helpers import make_args
    from megatron_ranks import leave_groups

    from slime.backends.create import create_backend
    from slime.plugins.megatron import optimizer

    replaced: list[Any] = []
    copied = optimizer._copied
    optimizer._copied = lambda main, copy: (
        replaced.append(weakref.ref(main)),
        copied(main, copy),
    )[1]

    for number, dtype in enumerate(("float32", "bfloat16")):
        for other, (given, low, high) in enumerate(
            (({}, 1.0, 1.0), ({"optimizer_offload_fraction": 0.5}, 0.5, 0.8))
        ):
            args = make_args(path, train_backend="megatron", world_size=1, train_dtype=dtype)
            args.megatron = {"optimizer_cpu_offload": True, **given}
            backend: Any = create_backend(
                args, "actor", rank, 1, "127.0.0.1", ports.get(2 * number + other)
            )
            gc.collect()
            assert replaced and not [main for main in replaced if main() is not None]
            replaced.clear()
            of_model = {p.data_ptr() for _, p in backend.weights.tensors()}
            (one,) = backend.optimizer.chained.chained_optimizers
            mains = [p for group in one.optimizer.param_groups for p in group["params"]]
            if dtype == "float32":  # where nothing moves, they are views of the model's parameters
                moved = sum(p.numel() for p in mains if p.data_ptr() not in of_model)
                assert low <= moved / sum(p.numel() for p in mains) <= high
            groups = [*one.shard_fp32_groups, *one.shard_fp32_from_float16_groups]
            assert {id(p) for group in groups for p in group} == {id(p) for p in mains}
            leave_groups()
