"""Routing replay (``--use-rollout-routing-replay``): the policy sends each token to the experts to
which the engine sent it (R3).

Routers of transformers choose experts with one ``topk`` over their scores, and take the weights of
the experts from scores of theirs. Here this ``topk`` is answered with the engine's experts, so that
weights and gradients are those of the current scores. Where the engine's experts are not known (the
last token of a sample, padding), the router chooses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from slime.backends.fsdp.expert_parallel import experts_of
from slime.data.fields import RankBatch
from slime.models.inputs import ModelInputs
from slime.models.loading import ModelError
from slime.models.segments import to_device

FLAG = "--use-rollout-routing-replay"
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
                raise ModelError(f"{FLAG}: {type(layer).__name__} has no known router: omit it")
            (router,) = routers
            # mypy reads the class as an object, which is no Hashable to it
            router.__class__ = _replaying(type(router))  # type: ignore[arg-type]
            vars(router).update(replay=self, place=len(self._routed))
            self._routed.append(number)
        if not self._routed:
            raise ModelError(f"{FLAG}: no decoder layer has routed experts: omit it")

    @contextmanager
    def during(self, batch: RankBatch) -> Iterator[None]:
        """Replay the routes of a batch within the context. A probe, which is no sample of a rollout,
        has none."""
        if batch.get(ROUTES) is None and "rewards" in batch:
            raise ModelError(f"{FLAG}: the samples have no experts of the engine")
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
                f"{FLAG}: the engine chose experts in {count} layers, but the model has "
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
                    f"{FLAG}: {kind.__name__} does not choose {routes.shape[2]} experts, as the "
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
