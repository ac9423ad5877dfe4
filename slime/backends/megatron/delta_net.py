"""The gated delta net of transformers as a layer of megatron-core, whose own does not compute packs."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING

from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from slime.backends.megatron.modules import Pack, device_of
from slime.models.layer_kinds import gated_delta_net
from slime.models.packed_layers import run_sequences

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class PackedDeltaNet(MegatronModule):
    """A gated delta net of transformers in the place of attention. Its state is reset at each sequence of a pack."""

    def __init__(
        self, config: TransformerConfig, layer_number: int, make: Callable[[int], nn.Module], **_: object
    ) -> None:
        """Create the layer. ``make`` returns the module of transformers for the index of a layer."""
        super().__init__(config=config)
        self.net = make(layer_number - 1).to(device_of(config), config.params_dtype)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: Pack | None = None,
        **_: object,
    ) -> tuple[Tensor, None]:
        """Return the output, ``[T, 1, H]`` like the input, and no bias."""
        assert packed_seq_params is not None and packed_seq_params.segments is not None, "packs only"
        mixer = lambda batch: self.net(hidden_states=batch)  # noqa: E731
        return run_sequences(mixer, hidden_states.squeeze(1), packed_seq_params.segments).unsqueeze(1), None


def delta_nets(hf_config: PretrainedConfig) -> Callable[[int], nn.Module]:
    """Return a function that makes the gated delta net of a layer, given its index, as transformers makes it."""
    module = inspect.getmodule(AutoModelForCausalLM._model_mapping[type(hf_config)])
    (name,) = (name for name in vars(module) if name.endswith(gated_delta_net.KIND.mixers))
    net: Callable[..., nn.Module] = getattr(module, name)
    return functools.partial(net, hf_config)
