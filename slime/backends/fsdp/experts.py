"""Routed experts: the ranks that have them, and the tokens that are sent to them.

Expert parallelism (``--fsdp-expert-parallel-size``) divides the experts of each layer among the
ranks of a group. A token is sent to the ranks that have its experts, and what these compute is sent
back. So no rank gathers all experts of a layer. FSDP shards a rank's experts over the ranks of a
replica that have the same ones, with a mesh of its own. A parameter of all experts is still one
DTensor with the shape of the checkpoint, each rank holds consecutive rows of it, and as many as
without expert parallelism. Therefore the optimizer, snapshots, copies and weight syncs need to know
nothing of it.

With routing replay (``--use-rollout-routing-replay``, R3) the policy sends each token to the
experts to which the engine sent it. Routers of transformers choose experts with one ``topk`` over
their scores, and take the weights of the experts from scores of theirs. Here this ``topk`` is
answered with the engine's experts, so that weights and gradients are those of the current scores.
Where the engine's experts are not known (the last token of a sample, padding), the router chooses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.overrides import TorchFunctionMode

from slime.backends.collectives import local
from slime.data.fields import RankBatch
from slime.models.autograd import Context, Gradients
from slime.models.grouped_experts import (
    combine,
    expert_outputs,
    grouped_experts,
    order_of_chunks,
    spread,
)
from slime.models.inputs import ModelInputs
from slime.models.loading import ModelError
from slime.models.lora import EXPERTS
from slime.models.segments import to_device

PARALLEL_FLAG = "--fsdp-expert-parallel-size"


def experts_of(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the routed experts below a module."""
    for name, part in module.named_modules():
        if name.rpartition(".")[2] == EXPERTS:
            yield part


def expert_mesh(device: torch.device, world_size: int, shard_size: int, experts: int) -> DeviceMesh:
    """Return the mesh ``(replicate, shard, expert)``: neighbouring ranks have other experts.

    Args:
        shard_size: The number of ranks of a replica.
        experts: The number of ranks among which the experts are divided.
    """
    sizes = (world_size // shard_size, shard_size // experts, experts)
    return init_device_mesh(device.type, sizes, mesh_dim_names=("replicate", "shard", "expert"))


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the dimensions of :func:`expert_mesh` over which FSDP shards and replicates."""
    return mesh["replicate", "shard"] if mesh["replicate"].size() > 1 else mesh["shard"]


def exchange_tokens(layers: Sequence[nn.Module], mesh: DeviceMesh) -> None:
    """Let the experts of decoder layers exchange tokens with the other ranks.

    Raises:
        ModelError: No layer has experts, they have another form than those of transformers, or they
            cannot be divided among the ranks.
    """
    modules = [module for layer in layers for module in experts_of(layer)]
    if not modules:
        raise ModelError(f"{PARALLEL_FLAG}: no decoder layer has routed experts: leave it out")
    ranks = mesh["shard"].size() * mesh["expert"].size()
    for module in modules:
        parameters = list(module.parameters(recurse=False))
        count = len(parameters[0]) if parameters else 0
        if not count or count != getattr(module, "num_experts", None):
            raise ModelError(
                f"{PARALLEL_FLAG}: {type(module).__name__} does not store its weights as one tensor for all "
                "experts: leave it out"
            )
        if count % ranks:
            raise ModelError(
                f"{PARALLEL_FLAG}: the {ranks} ranks that share a replica cannot have as many of the "
                f"{count} experts each: use an --fsdp-shard-size that divides {count}"
            )
        # mypy reads the class as an object, which is no Hashable to it
        module.__class__ = _exchanging(type(module))  # type: ignore[arg-type]
        module.expert_group = mesh.get_group("expert")  # type: ignore[assignment]


def divide_experts(module: nn.Module, mesh: DeviceMesh, device: torch.device) -> None:
    """Leave this rank's experts in a module, on ``device``, before FSDP shards them."""
    group = mesh["expert"]
    for part in module.modules():
        for name, whole in list(part._parameters.items()):
            assert whole is not None
            mine = whole.detach().chunk(group.size())[group.get_local_rank()]
            if not mine.is_meta:
                mine = mine.to(device)
            divided = DTensor.from_local(
                mine, group, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
            )
            setattr(part, name, nn.Parameter(divided, requires_grad=whole.requires_grad))


@functools.cache  # compiled layers share their code if the classes of their parts are the same
def _exchanging(experts: type[nn.Module]) -> type[nn.Module]:
    """Return the class of experts that compute the tokens of all ranks of their group."""

    class ExchangingExperts(experts):  # type: ignore[misc, valid-type]
        # A graph break: the sizes of the exchange are read back.
        @torch.compiler.disable
        def forward(
            self, hidden: Tensor, chosen: Tensor | None = None, weights: Tensor | None = None
        ) -> Tensor:
            if chosen is None or weights is None:
                # Llama 4 computes every expert for every token, and passes the tokens of each
                # expert after those of the one before.
                each = torch.arange(self.num_experts, device=hidden.device)
                tokens = len(hidden) // self.num_experts
                chosen = each.repeat_interleave(tokens).unsqueeze(1)
                weights = hidden.new_ones(chosen.shape)
            return grouped_experts(self, hidden, chosen, weights, exchanged_outputs)

    ExchangingExperts.__name__ = experts.__name__
    if not hasattr(experts, "_apply_gate"):  # those of Llama 4
        ExchangingExperts.has_gate = ExchangingExperts.is_transposed = True
        ExchangingExperts.has_bias = False
        ExchangingExperts._apply_gate = _gate
    return ExchangingExperts


def _gate(self: Any, rows: Tensor) -> Tensor:
    gate, up = rows.chunk(2, dim=-1)
    gated: Tensor = up * self.act_fn(gate)
    return gated


class _OfThisRank:
    """Experts whose weights are those of this rank."""

    def __init__(self, experts: nn.Module) -> None:
        self._experts = experts

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._experts, name)
        return local(value) if isinstance(value, Tensor) else value


def exchanged_outputs(self: Any, rows: Tensor, counts: Tensor) -> Tensor:
    """Return what the experts of all ranks make of this rank's rows; see
    :func:`slime.models.grouped_experts.expert_outputs`.

    This is a collective operation, also of ranks that have no rows, in which the host waits for the
    numbers of rows.
    """
    group: ProcessGroup = self.expert_group
    ranks = group.size()
    # Each rank's rows for the experts of this one: [ranks, experts of a rank].
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts, group=group)
    sizes = theirs.view(ranks, -1)
    sent, received = torch.stack([counts.view(ranks, -1).sum(1), sizes.sum(1)]).tolist()
    arrived = _Exchange.apply(rows, sent, received, group)
    # They arrive by rank and within it by expert, and are computed by expert.
    chunks = torch.arange(len(theirs), device=rows.device).view_as(sizes).t().reshape(-1)
    order = order_of_chunks(theirs, chunks, len(arrived))
    out = expert_outputs(_OfThisRank(self), spread(arrived, order), sizes.sum(0))
    returned: Tensor = _Exchange.apply(combine(out, order), received, sent, group)
    return returned


class _Exchange(torch.autograd.Function):
    """Rows for other ranks, in the order of ranks; the gradients go the way back."""

    @staticmethod
    def forward(
        ctx: Context, rows: Tensor, sent: list[int], received: list[int], group: ProcessGroup
    ) -> Tensor:
        ctx.settings = received, sent, group
        return _exchanged(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> Gradients:
        return _exchanged(grads[0], *ctx.settings), None, None, None


def _exchanged(rows: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
    arrived = rows.new_empty(sum(received), rows.shape[1])
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived


REPLAY_FLAG = "--use-rollout-routing-replay"
ROUTES = "rollout_routed_experts"
"""The key of the engine's experts, ``[total_length - 1, layers, topk]`` for each sample."""
NAMES = ("gate", "router")
"""How routers of transformers are named."""


class RoutingReplay:
    """The routers of all decoder layers.

    Raises:
        ModelError: No layer has experts, or a layer with experts has not one router.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._chosen: Sequence[Tensor] | None = None
        self.routes: Tensor | None = None
        """int16 ``[rows, layers with experts, topk]`` of the micro-batch; -1: the router
        chooses."""
        self._layers = len(layers)
        self._routed: list[int] = []  # the numbers of the layers with experts
        for number, layer in enumerate(layers):
            if not list(experts_of(layer)):
                continue
            routers: list[nn.Module] = [
                part
                for name, part in layer.named_modules()
                if name.rpartition(".")[2] in NAMES and hasattr(part, "num_experts")
            ]
            if len(routers) != 1:
                raise ModelError(
                    f"{REPLAY_FLAG}: {type(layer).__name__} has no known router: omit it"
                )
            (router,) = routers
            # mypy reads the class as an object, which is no Hashable to it
            router.__class__ = _replaying(type(router))  # type: ignore[arg-type]
            vars(router).update(replay=self, place=len(self._routed))
            self._routed.append(number)
        if not self._routed:
            raise ModelError(f"{REPLAY_FLAG}: no decoder layer has routed experts: omit it")

    @contextmanager
    def during(self, batch: RankBatch) -> Iterator[None]:
        """Replay the routes of a batch within the context. A probe, which is no sample of a rollout,
        has none."""
        if batch.get(ROUTES) is None and "rewards" in batch:
            raise ModelError(f"{REPLAY_FLAG}: the samples have no experts of the engine")
        self._chosen = batch.get(ROUTES)
        try:
            yield
        finally:
            self._chosen = self.routes = None

    def prepare(self, indices: Sequence[int], inputs: ModelInputs) -> None:
        """Let the next forward, also when it is recomputed in backward, have the routes of the
        samples at ``indices`` of the batch. A dummy has none."""
        self.routes = None
        if self._chosen is None or not indices:
            return
        ids = inputs.kwargs["input_ids"]
        assert isinstance(ids, Tensor)
        self.follow([self._chosen[i] for i in indices], inputs.sample_rows, ids)

    def follow(
        self, chosen: Sequence[Tensor], places: Sequence[tuple[np.ndarray, np.ndarray]], ids: Tensor
    ) -> None:
        """Let forwards have the routes of some samples.

        Args:
            chosen: The engine's experts of each sample.
            places: For each sample, rows of the flattened ``ids`` and the positions of their tokens.
        """
        samples = [np.asarray(routes) for routes in chosen]
        count, topk = samples[0].shape[1:]
        # Engines report all layers, or those with experts.
        every = list(range(len(self._routed)))
        columns = {self._layers: self._routed, len(self._routed): every}
        if count not in columns:
            raise ModelError(
                f"{REPLAY_FLAG}: the engine chose experts in {count} layers, but the model has "
                f"{self._layers}, {len(self._routed)} of them with experts"
            )
        routes = np.full((ids.numel(), len(self._routed), topk), -1, np.int16)
        for sample, (rows, positions) in zip(samples, places, strict=True):
            known = positions < len(sample)
            routes[rows[known]] = sample[positions[known]][:, columns[count]]
        self.routes = to_device(routes, ids.device)


@functools.cache  # compiled layers share their code if the classes of their parts are the same
def _replaying(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class of routers that use the experts of :class:`RoutingReplay`."""

    class ReplayingRouter(kind):  # type: ignore[misc, valid-type]
        # A graph break: the mode cannot be traced.
        @torch.compiler.disable
        def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
            routes: Tensor | None = self.replay.routes
            if routes is None:
                return super().forward(*given)
            with Answers(routes[:, self.place].long(), self.num_experts) as answers:
                result: tuple[Tensor, ...] = super().forward(*given)
            if not answers.given:
                raise ModelError(
                    f"{REPLAY_FLAG}: {kind.__name__} does not choose {routes.shape[2]} experts, as the "
                    f"engine did, by one topk over {self.num_experts} scores"
                )
            return result

    ReplayingRouter.__name__ = kind.__name__
    return ReplayingRouter


class Answers(TorchFunctionMode):
    """Answers the ``topk`` over the scores of all ``experts`` with ``chosen``, ``[rows, topk]``.
    Those over groups of experts have other shapes."""

    def __init__(self, chosen: Tensor, experts: int) -> None:
        super().__init__()
        self.chosen = chosen
        self.scores = (len(chosen), experts)
        self.given = False

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        result = function(*args, **kwargs or {})
        if function not in (torch.topk, Tensor.topk) or args[0].shape != self.scores:
            return result
        if result.indices.shape != self.chosen.shape:
            return result
        self.given = True
        chosen = torch.where(self.chosen < 0, result.indices, self.chosen)
        return torch.return_types.topk((args[0].gather(1, chosen), chosen))
