"""The trained weights of all models on one base, of which those of one at a time are in the layers.

Everything here runs on the thread of the training rank. A model has an adapter, with its own rank,
or, without adapters in the layers, all weights (its rank is then 0). They are put into the layers
by exchanging the memory of the parameters, so a change costs no copy. Gradients, moments and the
number of steps go with them, so a model's numbers are those of a run by itself.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.backends import primitives
from slime.backends.trainable import seed_of
from slime.data.fields import Wire, to_rank_batch
from slime.models.lora import initial_factor
from slime.types import AdamSettings

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from slime.backends.fsdp.backend import FsdpBackend

ALPHA = 32.0
"""The alpha of all adapters, as in the API; their scale is this divided by the rank."""


@dataclass
class Adapter:
    """What belongs to one model while it is not in the layers, in the order of the parameters."""

    rank: int
    values: list[Tensor]
    moments: list[dict[str, Tensor]]
    gradients: list[Tensor | None] = field(default_factory=list)
    steps: int = 0


class Adapters:
    """What all models train, by their names."""

    def __init__(self) -> None:
        self.apart: dict[str, Adapter] = {}
        self.current: str | None = None
        self._base: list[Tensor] = []

    # --- which is in the layers --------------------------------------------------------------

    def create(self, backend: FsdpBackend, name: str, rank: int, seed: int) -> None:
        """Make an adapter with ``A`` of this seed and ``B`` of zeros; with rank 0, a copy of all
        weights of the base model.
        """
        import torch

        _check_kind(backend, rank)
        if backend.adapter is None:
            # The memory that is in the layers before any model's.
            self._base = self._base or [p.data for p in _parameters(backend)]
            copies = [x.clone() for x in self._base]
            self.apart[name] = Adapter(0, copies, [_no_moments(x) for x in copies])
            return
        settings = replace(backend.adapter.settings, rank=rank, alpha=ALPHA)
        values = []
        for path, layer in backend.adapter.layers.items():
            values.append(
                initial_factor(settings, layer.in_features, seed_of(seed, path)).to(backend.device)
            )
            values.append(torch.zeros(layer.out_features, rank, device=backend.device))
        self.apart[name] = Adapter(rank, values, [_no_moments(x) for x in values])

    def use(self, backend: FsdpBackend, name: str) -> None:
        """Put an adapter into the layers."""
        if name == self.current:
            return
        if self.current is not None:
            self.apart[self.current] = self._taken(backend)
            self.current = None
        found = self.apart.pop(name)
        gradients = found.gradients or [None] * len(found.values)
        for parameter, value, moments, gradient in zip(
            _parameters(backend), found.values, found.moments, gradients, strict=True
        ):
            parameter.grad = None  # which has the shape of the adapter before
            parameter.data = value
            parameter.grad = gradient
            backend.optimizer.adam.state[parameter] = moments
        if (adapter := backend.adapter) is not None:
            adapter.settings = replace(adapter.settings, rank=found.rank, alpha=ALPHA)
            for layer in adapter.layers.values():
                layer.lora_scale = adapter.settings.scale
        backend.optimizer.steps = found.steps
        self.current = name

    def _taken(self, backend: FsdpBackend) -> Adapter:
        """Return what is in the layers."""
        parameters = _parameters(backend)
        return Adapter(
            0 if backend.adapter is None else backend.adapter.settings.rank,
            [p.data for p in parameters],
            [backend.optimizer.adam.state[p] for p in parameters],
            [p.grad for p in parameters],
            backend.optimizer.steps,
        )

    # --- what the API asks for ---------------------------------------------------------------

    def compute(
        self,
        backend: FsdpBackend,
        name: str,
        wire: Wire,
        loss: str,
        options: Mapping[str, float],
        learns: bool,
    ) -> tuple[float, list[np.ndarray]]:
        """Return a loss and the log-probs of each datum; add the gradients, if the model learns."""
        self.use(backend, name)
        batch = to_rank_batch(wire)
        if learns:
            metrics, log_probs = primitives.forward_backward(backend, batch, loss, options)
            value = metrics["loss"]
        else:
            log_probs = backend.log_probs(batch, temperature=1.0)["log_probs"]
            value = primitives.token_loss_sum(loss, options, batch, log_probs)
        places = [int(place) for place in wire["partition"]]  # in the order of the request's data
        found = dict(zip(places, log_probs, strict=True))
        return value, [found[place].numpy() for place in range(len(places))]

    def step(self, backend: FsdpBackend, name: str, adam: AdamSettings) -> dict[str, float]:
        """Take a step of the optimizer."""
        self.use(backend, name)
        return primitives.optim_step(backend, adam)

    def save(self, backend: FsdpBackend, name: str, file: Path, facts: Mapping[str, Any]) -> None:
        """Write factors, moments and facts into a file, which is there completely or not at all."""
        from safetensors.torch import save_file

        self.use(backend, name)
        held = self._taken(backend)
        tensors: dict[str, Tensor] = {}
        for place, (value, moments) in enumerate(zip(held.values, held.moments, strict=True)):
            tensors[f"{place}/value"] = value
            tensors |= {f"{place}/{key}": x for key, x in moments.items()}
        told = json.dumps({"rank": held.rank, "steps": held.steps, **facts})
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".part")
        save_file({key: x.contiguous() for key, x in tensors.items()}, part, {"facts": told})
        os.replace(part, file)

    def load(self, backend: FsdpBackend, name: str, file: Path, optimizer: bool) -> None:
        """Make the adapter that of a file of :meth:`save`, with new moments or those of the file;
        its gradients are dropped.
        """
        from safetensors import safe_open

        if name == self.current:
            self.apart[name] = self._taken(backend)
            self.current = None
        facts = facts_of(file)
        _check_kind(backend, facts["rank"])
        with safe_open(file, "pt", device=str(backend.device)) as stored:
            keys = sorted(stored.keys())
            count = len({key.partition("/")[0] for key in keys})
            values = [stored.get_tensor(f"{place}/value") for place in range(count)]
            moments = [_no_moments(x) for x in values]
            if optimizer:
                moments = [
                    {key: stored.get_tensor(f"{place}/{key}") for key in moments[place]}
                    for place in range(count)
                ]
        steps = facts["steps"] if optimizer else 0
        self.apart[name] = Adapter(facts["rank"], values, moments, steps=steps)

    def export(self, backend: FsdpBackend, name: str, folder: Path) -> None:
        """Write an adapter in PEFT's files, or all weights as a Hugging Face folder."""
        self.use(backend, name)
        backend.save_hf(folder)

    def drop(self, backend: FsdpBackend, name: str) -> None:
        """Free the memory of an adapter."""
        if name == self.current:
            self.apart[name] = self._taken(backend)
            self.current = None
        self.apart.pop(name, None)


def facts_of(file: Path) -> dict[str, Any]:
    """Return the facts of a file of :meth:`Adapters.save`."""
    from safetensors import safe_open

    with safe_open(file, "pt") as stored:
        facts: dict[str, Any] = json.loads(stored.metadata()["facts"])
    return facts


def _check_kind(backend: FsdpBackend, rank: int) -> None:
    if backend.adapter is None and rank:
        raise ValueError(f"this server trains all weights: ask for rank 0, not {rank}")
    if backend.adapter is not None and not rank:
        raise ValueError(
            "this server trains adapters: ask for a rank from 1 to 512, or start it with "
            "--all-weights"
        )


def _parameters(backend: FsdpBackend) -> list[Any]:
    if backend.adapter is None:
        return list(backend.optimizer.parameters)
    return [x for layer in backend.adapter.layers.values() for x in (layer.lora_A, layer.lora_B)]


def _no_moments(value: Tensor) -> dict[str, Tensor]:
    import torch

    zeros = partial(torch.zeros_like, value)
    return {
        "step": torch.zeros((), dtype=torch.float32, device=value.device),
        "exp_avg": zeros(),
        "exp_avg_sq": zeros(),
    }
