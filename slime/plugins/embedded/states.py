"""The states of recurrent layers and short convolutions, one per slot.

transformers computes these layers. It reads and writes their states through a cache object, whose states are views of
the tensors of the slots here. A prompt runs as one sequence that continues the state of its slot. A decode step runs as
a batch of one token for each of several consecutive slots. In deterministic mode each row runs alone, because no row
count is known to give the same bits in these layers.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer

from slime.models.layer_kinds import GATED_DELTA_NET, layers_of
from slime.models.loading import ModelError
from slime.plugins.embedded import attention
from slime.plugins.embedded.attention import StateRun, StepContext
from slime.plugins.embedded.row_attention import use_slot_attention

INSTEAD = "use an SGLang engine"
ONE_STATE = not isinstance(LinearAttentionLayer().has_previous_state, dict)
"""Whether a layer of transformers' cache has one state (5.10 to 5.12) and not several with numbers (5.17 and newer)."""
Forward = Callable[..., torch.Tensor]


def use_slots(model: PreTrainedModel) -> bool:
    """Let the layers with a state use that of the slots, and attention that needs whole sequences their positions.
    Outside of an engine step, they compute as before.

    Returns:
        Whether the model has layers with a state.

    Raises:
        ModelError: It has layers that the engine does not compute. The message says why.
    """
    layers = layers_of(model, INSTEAD)
    use_slot_attention(model, layers)
    mixers = list(layers.mixers())
    if others := sorted({kind.name for kind, _, _ in mixers if kind is not GATED_DELTA_NET} if ONE_STATE else ()):
        raise ModelError(
            f"layers of the kind {', '.join(others)} do not continue the state of a prompt in transformers "
            f"{transformers.__version__}: install transformers 5.17 or newer, or {INSTEAD}"
        )
    for index, (kind, _, mixer) in enumerate(mixers):
        kind.serve(mixer)
        mixer.forward = types.MethodType(_with_slots(mixer.forward, index), mixer)
    return bool(mixers)


def _with_slots(plain: Forward, index: int) -> Forward:
    names = inspect.signature(plain).parameters
    name = "cache_params" if "cache_params" in names else "past_key_values"

    def forward(self: torch.nn.Module, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        step = attention.current_step()
        if step is None:
            return plain(hidden_states, *args, **kwargs)
        parts = []
        for run in step.runs:
            count = run.end - run.start
            batch = hidden_states[0, run.start : run.end].unflatten(0, (1, count) if run.one_slot else (count, 1))
            states = RunStates(step, index, int(self.layer_idx), run)  # type: ignore[arg-type]
            with step.part(self, run.start, run.end, not run.one_slot):
                parts.append(plain(hidden_states=batch, **{name: states}).flatten(0, 1))
            states.keep()
        return torch.cat(parts)[None]

    return forward


class RunStates:
    """What a module uses of transformers' ``Cache``, for one run of rows.

    The states of the slots are changed in place. A run from position 0 begins without states.
    """

    def __init__(self, step: StepContext, index: int, layer: int, run: StateRun) -> None:
        self.step, self.index, self.run = step, index, run
        self.own = LinearAttentionLayer()
        self.layers = {layer: self.own}
        stored = None if run.first else step.cache.states.get(index)
        for kind, tensor in (stored or {}).items():
            view = tensor[run.slots]
            self.set_state(kind, view if step.keep_states else view.clone())

    def set_state(self, kind: str, state: torch.Tensor) -> None:
        values = {"has_previous_state": True, f"{kind}_states": state, f"is_{kind}_states_initialized": True}
        if kind == "conv":
            values["conv_kernel_size"] = state.shape[-1]
        for name, value in values.items():
            if ONE_STATE:
                setattr(self.own, name, value)
            else:
                getattr(self.own, name)[0] = value

    def _held(self, name: str, state_idx: int = 0) -> Any:
        held = getattr(self.own, name)
        return held if ONE_STATE else held[state_idx]

    def has_previous_state(self, layer_idx: int, state_idx: int = 0) -> bool:
        return bool(self._held("has_previous_state", state_idx))

    def update_conv_state(self, conv_states: torch.Tensor, layer_idx: int, **kwargs: Any) -> torch.Tensor:
        return self.layers[layer_idx].update_conv_state(conv_states, **kwargs)

    def update_recurrent_state(self, recurrent_states: torch.Tensor, layer_idx: int, **kwargs: Any) -> torch.Tensor:
        return self.layers[layer_idx].update_recurrent_state(recurrent_states, **kwargs)

    def keep(self) -> None:
        """Store the states of a run that began without them."""
        if not self.run.first or not self.step.keep_states:
            return
        for kind in ("conv", "recurrent"):
            if (state := self._held(f"{kind}_states")) is not None:
                self.step.cache.state(self.index, kind, state)[self.run.slots].copy_(state)
