"""Layers of transformers that need more of the slots than the attention function: states,
positions, indexers.

transformers computes recurrent layers and short convolutions. It reads and writes their states
through a cache object, whose states are views of the tensors of the slots here. A prompt runs as
one sequence that continues the state of its slot. A decode step runs as a batch of one token for
each of several consecutive slots. In deterministic mode each row runs alone, because no row count
is known to give the same bits in these layers.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer

from slime.models.layer_kinds import GATED_DELTA_NET, ModelLayers, Sees, all_before, layers_of
from slime.models.loading import ModelError
from slime.plugins.embedded import attention
from slime.plugins.embedded.attention import (
    Bounds,
    RowGroup,
    Segment,
    Selected,
    StateRun,
    StepContext,
    rows_of_group,
)

INSTEAD = "use an SGLang engine"
ONE_STATE = not isinstance(LinearAttentionLayer().has_previous_state, dict)
"""Whether a layer of transformers' cache has one state (5.10 to 5.12) and not several with numbers
(5.17 and newer).
"""
Forward = Callable[..., torch.Tensor]


def use_slots(model: PreTrainedModel) -> bool:
    """Let the layers with a state use that of the slots, and attention that needs whole sequences
    their positions. Outside of an engine step, they compute as before.

    Returns:
        Whether the model has layers with a state.

    Raises:
        ModelError: It has layers that the engine does not compute. The message says why.
    """
    layers = layers_of(model, INSTEAD)
    use_slot_attention(model, layers)
    mixers = list(layers.mixers())
    if others := sorted(
        {kind.name for kind, _, _ in mixers if kind is not GATED_DELTA_NET} if ONE_STATE else ()
    ):
        raise ModelError(
            f"layers of the kind {', '.join(others)} do not continue the state of a prompt in "
            f"transformers {transformers.__version__}: install transformers 5.17 or newer, or "
            f"{INSTEAD}"
        )
    for index, (kind, _, mixer) in enumerate(mixers):
        kind.serve(mixer)
        mixer.forward = types.MethodType(_with_states(mixer.forward, index), mixer)
    return bool(mixers)


def _with_states(plain: Forward, index: int) -> Forward:
    names = inspect.signature(plain).parameters
    name = "cache_params" if "cache_params" in names else "past_key_values"

    def forward(
        self: torch.nn.Module, hidden_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        step = attention.current_step()
        if step is None:
            return plain(hidden_states, *args, **kwargs)
        parts = []
        for run in step.runs:
            count = run.end - run.start
            batch = hidden_states[0, run.start : run.end].unflatten(
                0, (1, count) if run.one_slot else (count, 1)
            )
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
        self.step = step
        self.index = index
        self.run = run
        self.own = LinearAttentionLayer()
        self.layers = {layer: self.own}
        stored = None if run.first else step.cache.states.get(index)
        for kind, tensor in (stored or {}).items():
            view = tensor[run.slots]
            self.set_state(kind, view if step.keep_states else view.clone())

    def set_state(self, kind: str, state: torch.Tensor) -> None:
        values = {
            "has_previous_state": True,
            f"{kind}_states": state,
            f"is_{kind}_states_initialized": True,
        }
        if kind == "conv":
            values["conv_kernel_size"] = state.shape[-1]
        for name, value in values.items():
            if ONE_STATE:
                setattr(self.own, name, value)
            else:
                getattr(self.own, name)[0] = value

    def _held(self, name: str, state_idx: int = 0) -> Any:
        value = getattr(self.own, name)
        return value if ONE_STATE else value[state_idx]

    def has_previous_state(self, layer_idx: int, state_idx: int = 0) -> bool:
        return bool(self._held("has_previous_state", state_idx))

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, **kwargs: Any
    ) -> torch.Tensor:
        return self.layers[layer_idx].update_conv_state(conv_states, **kwargs)

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, **kwargs: Any
    ) -> torch.Tensor:
        return self.layers[layer_idx].update_recurrent_state(recurrent_states, **kwargs)

    def keep(self) -> None:
        """Store the states of a run that began without them."""
        if not self.run.first or not self.step.keep_states:
            return
        for kind in ("conv", "recurrent"):
            if (state := self._held(f"{kind}_states")) is not None:
                self.step.cache.state(self.index, kind, state)[self.run.slots].copy_(state)


# Attention modules that take their row for one whole sequence, on the rows of a step.
#
# transformers computes these modules. For generation it gives them a cache object and a mask over
# one sequence; here the cache object answers for the slots of the rows, and slots_attention
# makes the masks. So Llama 4 scales each query by the position in its slot, and its chunks are
# counted there. The indexers of DeepSeek V3.2 and GLM-5 have keys of their own, which lie in the
# slots like the keys of the attention. They score the keys of each group or segment, and the
# attention of a decode step reads the selected keys only.


SCORES_AT_ONCE = 2**26
"""The most scores (queries times heads times keys) of an indexer that are held at a time, of 4
bytes each.
"""


def use_slot_attention(model: PreTrainedModel, layers: ModelLayers) -> None:
    """Let the attention modules that need whole sequences compute the rows of a step. Outside of a
    step, they compute as before."""
    bind: Callable[[Sees], Any] = functools.cache(
        # one for all layers, which share masks
        lambda sees: functools.partial(sees, model.config.get_text_config())
    )
    for sees, _, module in layers.whole_attentions():
        bounds = Bounds(sees=tuple(bind(bound) for bound in sees if bound is not all_before))
        module.forward = types.MethodType(_with_slots(module.forward, bounds), module)
    for indexer in layers.indexers():
        indexer.forward = types.MethodType(_with_index_keys(indexer.forward), indexer)


def _with_slots(plain: Callable[..., Any], bounds: Bounds) -> Callable[..., Any]:
    def forward(self: nn.Module, hidden_states: Tensor, **kwargs: Any) -> Any:
        step = attention.current_step()
        if step is None:
            return plain(hidden_states=hidden_states, **kwargs)
        # Nothing reads this mask. It has the axes that the module takes apart for its indexer.
        kwargs["attention_mask"] = hidden_states.new_zeros(1, 1, 1, 1)
        kwargs["past_key_values"] = _SlotCache(step)
        return plain(hidden_states=hidden_states, bounds=bounds, **kwargs)

    return forward


class _SlotCache:
    """What an attention module uses of transformers' ``Cache``, for the rows of a step."""

    def __init__(self, step: StepContext) -> None:
        self.step = step

    def get_seq_length(self, layer_idx: int = 0) -> Tensor:
        """Return what the module must add to the index of each row to get its position, int64
        ``[rows]``.
        """
        positions = self.step.positions
        return positions - torch.arange(len(positions), device=positions.device)

    def update(self, key: Tensor, value: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of the new rows, which the attention function stores."""
        return key, value


def _with_index_keys(plain: Callable[..., Tensor]) -> Callable[..., Tensor | Selected]:
    def forward(
        self: nn.Module,
        hidden_states: Tensor,
        q_resid: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor | Selected:
        step = attention.current_step()
        if step is None:
            return plain(
                hidden_states, q_resid, position_embeddings, attention_mask, *args, **kwargs
            )
        heads: int = self.n_heads  # type: ignore[assignment]

        def select(start: int, end: int, each: bool, keys: _IndexKeys, mask: Tensor) -> Tensor:
            """Select for the rows ``start`` to ``end - 1``: as one sequence, or as a batch of one
            token each.
            """
            with_batch = functools.partial(_of_rows, start=start, end=end, each=each)
            rotary = (with_batch(position_embeddings[0]), with_batch(position_embeddings[1]))
            with step.part(self, start, end, each):
                return plain(
                    with_batch(hidden_states),
                    with_batch(q_resid),
                    rotary,
                    mask,
                    None,
                    past_key_values=keys,
                )

        selected: dict[RowGroup | Segment, Tensor | None] = {}
        # Rows of decode steps, each with the keys of its own slot.
        for group in step.groups:
            mask = step.row_mask(group, attention.UNBOUNDED, hidden_states.dtype)[:, 0]
            chosen = select(group.start, group.end, True, _IndexKeys(step, group), mask)[
                :, 0
            ].long()
            # In ascending order they are summed in an order that depends on nothing else.
            selected[group] = chosen.sort(-1).values if chosen.shape[-1] < group.length else None
        # Prompts, as one sequence each.
        for segment in step.segments:
            selected[segment] = _select_of_segment(step, segment, heads, select)
        return selected

    return forward


def _of_rows(tensor: Tensor, start: int, end: int, each: bool) -> Tensor:
    """Return some rows of ``[1, rows, d]``: ``[1, n, d]``, or ``[n, 1, d]`` with ``each``."""
    return tensor[:, start:end].transpose(0, 1) if each else tensor[:, start:end]


def _select_of_segment(
    step: StepContext,
    segment: Segment,
    heads: int,
    select: Callable[[int, int, bool, _IndexKeys, Tensor], Tensor],
) -> Tensor | None:
    """Return whether each key is selected, ``[queries, length]`` bool, or None if all are.

    The segment is divided, so that no more than :data:`SCORES_AT_ONCE` scores are held.
    """
    rows = segment.end - segment.start
    at_once = max(1, SCORES_AT_ONCE // (heads * segment.length))
    device = step.write_index.device
    selected = torch.zeros(rows, segment.length, dtype=torch.bool, device=device)
    most = 0
    for first in range(0, rows, at_once):
        last = min(first + at_once, rows)
        part = Segment(
            segment.start + first, segment.start + last, segment.slot, segment.length - rows + last
        )
        sees = (
            torch.arange(part.length, device=device) <= step.positions[part.start : part.end, None]
        )
        # added to the scores: transformers 5.12 takes no booleans
        mask = torch.zeros(sees.shape, device=device).masked_fill_(~sees, -torch.inf)
        chosen = select(part.start, part.end, False, _IndexKeys(step, part), mask[None])[0].long()
        selected[first:last].scatter_(1, chosen, True)
        most = chosen.shape[-1]
    return selected if most < segment.length else None


class _IndexKeys:
    """What an indexer uses of transformers' ``Cache``, for one group or segment of a step."""

    def __init__(self, step: StepContext, part: RowGroup | Segment) -> None:
        self.step = step
        self.part = part

    def update_indexer(self, key: Tensor, layer_idx: int) -> Tensor:
        """Store the new keys, ``[n, rows, d]``, and return those of all positions, ``[n, length,
        d]``.
        """
        step = self.step
        part = self.part
        step.cache.write_index_keys(
            layer_idx, step.write_index[part.start : part.end], key.flatten(0, 1)[:, None]
        )
        store = step.cache.index_keys[layer_idx]
        if isinstance(part, RowGroup):
            return rows_of_group(store, part)[:, :, 0]
        return store[part.slot, None, : part.length, 0]
