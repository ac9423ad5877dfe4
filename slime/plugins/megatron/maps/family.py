"""Model families: the shape of a model in Megatron's settings, the checkpoint tensors of each
parameter, and how the family of a model is found."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from slime.config.layout import ParallelLayout
from slime.models.loading import load_hf_config
from slime.models.stored import NamedWeights
from slime.plugins.megatron.maps import (
    COLUMNS,
    REPLICATED,
    ROWS,
    Layout,
    QueryKeyValue,
    Stacked,
    Vocabulary,
)
from slime.registry import find, parts

if TYPE_CHECKING:
    from transformers import PretrainedConfig


Settings = dict[str, Any]
"""The values of Megatron's flags by their ``dest``, as a model script would set them. Megatron has
no flags for ``qk_norm_over_heads`` (the norms of query and key are over all heads together),
``gelu_tanh`` (in place of SiLU), ``without_input_norms`` (there are none before attention and MLP),
and the factors ``embedding_scale`` (on the input embeddings), ``residual_scale`` (on what a layer
adds) and ``logit_scale``."""

HfConfig = Mapping[str, Any]
"""The content of config.json with all defaults (``config.to_dict()`` of transformers)."""

WITH_VISION = "with_vision"
"""The setting of a model that is the text part of a checkpoint with a vision part."""

DEFAULT_VOCABULARY_MULTIPLE = 64
"""The padded vocabulary depends on the model only and not on the parallel layout, so that a
checkpoint can be loaded with another layout."""


@dataclass(frozen=True)
class Entry:
    """One Megatron parameter or buffer, and the Hugging Face tensors with the same values.

    Attributes:
        megatron: The name in the whole model (``decoder.layers.<global index>...``).
        hf: The names of the Hugging Face tensors. With experts they contain ``{expert}``, unless
            ``is_stacked``.
        layout: How the tensors are joined and divided among ranks.
        experts: The number of experts, which is the first dimension of the parameter; 0 for none.
    """

    megatron: str
    hf: tuple[str, ...]
    layout: Layout = REPLICATED
    experts: int = 0

    @property
    def is_stacked(self) -> bool:
        """Whether each Hugging Face tensor has all experts, in its first dimension. The layout is
        that of one.
        """
        return self.experts > 0 and "{expert}" not in self.hf[0]

    def found_in(self, checkpoint: NamedWeights) -> Entry:
        """Return the entry for reading a checkpoint, which may have all experts of a layer in
        ``gate_up_proj`` and ``down_proj``, as public ones of Qwen3.5 have.
        """
        module, _, rest = self.hf[0].partition("{expert}.")
        together = len(self.hf) == 2
        name = f"{module}gate_up_proj" if together else module + rest.removesuffix(".weight")
        if not rest or name not in checkpoint:
            return self
        layout = Stacked(fused=True) if together else self.layout
        return dataclasses.replace(self, hf=(name,), layout=layout)


def projection_layouts(entry: Entry) -> list[Layout]:
    """Return the layouts of the single tensors in a weight whose output features are divided among
    ranks.
    """
    if isinstance(entry.layout, QueryKeyValue) and not entry.layout.fused:
        return [entry.layout.query, ROWS, ROWS]
    return [entry.layout] if len(entry.hf) == 1 else [ROWS] * len(entry.hf)


@dataclass(frozen=True)
class Family:
    """The description of one model family.

    Attributes:
        name: The name for ``--model-name``.
        model_types: The values of ``model_type`` in config.json.
        settings: Converts config.json to Megatron's settings.
        layer: Returns the entries of one layer, given the settings and its global index.
        prefix: The prefix of the tensor names in the checkpoint.
        text_prefix: The same in a checkpoint that also has a vision part; None if slime does not
            train the text part of such a checkpoint.
    """

    name: str
    model_types: tuple[str, ...]
    settings: Callable[[HfConfig], Settings]
    layer: Callable[[Settings, int], list[Entry]]
    prefix: str = "model."
    text_prefix: str | None = None

    def settings_of(self, config: HfConfig) -> Settings:
        """Return Megatron's settings of a model.

        Args:
            config: As :func:`text_config` gives it.

        Raises:
            ValueError: slime does not train the text part of such a checkpoint.
        """
        if not config.get(WITH_VISION):
            return self.settings(config)
        if self.text_prefix is None:
            raise ValueError(f"{self.name} has a vision part: use --train-backend fsdp")
        return self.settings(config) | {WITH_VISION: True}

    def entries(self, settings: Settings) -> Iterator[Entry]:
        """Yield the entries of all parameters in the order of the checkpoint, from the embedding to
        the output.
        """
        if not settings.get(WITH_VISION):
            yield from self._entries(settings)
            return
        for entry in self._entries(settings):
            # the output layer is outside of the text part
            inside = [name.removeprefix(self.prefix) for name in entry.hf]
            yield (
                dataclasses.replace(entry, hf=tuple(f"{self.text_prefix}{x}" for x in inside))
                if inside != [*entry.hf]
                else entry
            )

    def vision_part(
        self, settings: Settings, checkpoint: NamedWeights
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield what a checkpoint with a vision part has besides the text model and the layers for
        multi-token prediction, as it is in the files; quantized tensors are dequantized.
        """
        for name in checkpoint.shapes() if settings.get(WITH_VISION) else ():
            if name.startswith(self.prefix) and not name.startswith(str(self.text_prefix)):
                yield name, checkpoint.get(name)

    def _entries(self, settings: Settings) -> Iterator[Entry]:
        vocabulary = Vocabulary(rows=settings["vocab_size"], padded=padded_vocab_size(settings))
        yield Entry(
            "embedding.word_embeddings.weight", (f"{self.prefix}embed_tokens.weight",), vocabulary
        )
        for index in range(settings["num_layers"]):
            yield from self.layer(settings, index)
        yield Entry("decoder.final_layernorm.weight", (f"{self.prefix}norm.weight",))
        if settings.get("untie_embeddings_and_output_weights"):
            yield Entry("output_layer.weight", ("lm_head.weight",), vocabulary)


def padded_vocab_size(settings: Settings) -> int:
    """Return the number of rows of Megatron's embedding: ``--padded-vocab-size``, or the next
    multiple of ``--make-vocab-size-divisible-by``."""
    if settings.get("padded_vocab_size"):
        return int(settings["padded_vocab_size"])
    multiple = settings.get("make_vocab_size_divisible_by") or DEFAULT_VOCABULARY_MULTIPLE
    return math.ceil(settings["vocab_size"] / multiple) * multiple


# --- shapes ---


def dense_settings(config: HfConfig) -> Settings:
    """Return the settings common to all families with grouped-query attention, RMSNorm and
    SwiGLU.
    """
    require_silu(config)
    heads = config["num_attention_heads"]
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if windowed := rope.get("sliding_attention"):
        rope_type(windowed, FROM_TRANSFORMERS)
        rope = rope["full_attention"]
    return {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "ffn_hidden_size": config["intermediate_size"],
        "num_attention_heads": heads,
        "group_query_attention": config["num_key_value_heads"] != heads,
        "num_query_groups": config["num_key_value_heads"],
        "kv_channels": config.get("head_dim") or config["hidden_size"] // heads,
        "swiglu": True,
        "normalization": "RMSNorm",
        "norm_epsilon": config["rms_norm_eps"],
        "add_bias_linear": False,
        "position_embedding_type": "rope",
        "rotary_base": rope.get("rope_theta", config.get("rope_theta")),
        "rotary_percent": float(
            rope.get("partial_rotary_factor", config.get("partial_rotary_factor")) or 1.0
        ),
        "vocab_size": config["vocab_size"],
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", False),
        "max_position_embeddings": config["max_position_embeddings"],
        **_rope_scaling(rope),
        **_windows(config),
    }


def _windows(config: HfConfig) -> Settings:
    """Return the sliding window, as the keys before and after a query, and which layers have it."""
    window = config.get("sliding_window")
    types = config.get("layer_types")
    slides = [int(kind == "sliding_attention") for kind in types] if types else [1]
    if other := sorted(set(types or ()) - {"full_attention", "sliding_attention"}):
        raise ValueError(
            f"layers of the types {', '.join(other)} have no Megatron map: use --train-backend fsdp"
        )
    if types and any(slides) and not window:
        raise ValueError(
            "config.json has layers of the type sliding_attention, but no sliding_window: add it"
        )
    if not window or not any(slides):
        return {}
    return {
        "window_size": [window - 1, 0],
        **({} if all(slides) else {"window_attn_skip_freq": slides}),
    }


def require_without(config: HfConfig, *names: str) -> None:
    """Raise ValueError if one of these keys of config.json is set, because the map does not have
    what it means.
    """
    if found := [name for name in names if config.get(name)]:
        raise ValueError(
            f"{config['model_type']} with {', '.join(found)} has no Megatron map: use "
            "--train-backend fsdp"
        )


def require_silu(config: HfConfig) -> None:
    """Raise ValueError if config.json has another activation than SwiGLU's in ``hidden_act``."""
    if (activation := config.get("hidden_act") or "silu") not in ("silu", "swish"):
        raise ValueError(
            f"{config['model_type']} with hidden_act {activation!r} has no Megatron map: use "
            "--train-backend fsdp"
        )


def rope_type(rope: HfConfig, built: tuple[str, ...]) -> str:
    """Return the type of rotary positions in ``rope_parameters`` of config.json.

    Raises:
        ValueError: The type is not in ``built``. If it were ignored, the trained model would differ
            from the one that the engines serve.
    """
    kind = str(rope.get("rope_type", rope.get("type", "default")))
    if kind not in built:
        raise ValueError(
            f"the Megatron backend does not support rope_type {kind!r} of config.json for this "
            f"family; it supports {', '.join(built)}: use --train-backend fsdp"
        )
    return kind


FROM_TRANSFORMERS = ("default", "yarn", "linear")
"""The types of rotary positions for which the backend takes the frequencies from transformers."""


def _rope_scaling(rope: HfConfig) -> Settings:
    kind = rope_type(rope, ("llama3", *FROM_TRANSFORMERS))
    if kind == "llama3":
        fixed = {
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        differing = {k: rope.get(k) for k, v in fixed.items() if rope.get(k) != v}
        if differing:
            raise ValueError(
                f"rope_type llama3 with {differing} is not supported: megatron-core always uses "
                f"{fixed}"
            )
        return {"use_rope_scaling": True, "rope_scaling_factor": float(rope["factor"])}
    return {}


def moe_settings(config: HfConfig) -> Settings:
    """Return the settings of experts with a softmax router."""
    # those of config.json and of transformers
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    return {
        "num_experts": next(config[name] for name in names if config.get(name)),
        "moe_ffn_hidden_size": config["moe_intermediate_size"],
        "moe_router_topk": config["num_experts_per_tok"],
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": True,
        "moe_router_score_function": "softmax",
        "moe_router_dtype": "fp32",
    }


def moe_layers(settings: Settings) -> list[bool]:
    """Return for each layer whether it has experts, from ``--moe-layer-freq``, which is a number or
    a list.
    """
    count = settings["num_layers"]
    if not settings.get("num_experts"):
        return [False] * count
    frequency = settings.get("moe_layer_freq", 1)
    if isinstance(frequency, str):
        frequency = parse_layer_frequency(frequency)
    if isinstance(frequency, int):
        return [index % frequency == 0 for index in range(count)]
    if len(frequency) != count:
        raise ValueError(f"--moe-layer-freq has {len(frequency)} entries for {count} layers")
    return [bool(x) for x in frequency]


def parse_layer_frequency(text: str) -> int | list[int]:
    """Parse Megatron's expression for ``--moe-layer-freq``: ``2`` or ``[0]*3+[1]*58``, with or
    without parentheses.

    >>> parse_layer_frequency("([0]*1+[1]*2)")
    [0, 1, 1]
    """
    if text.strip().isdigit():
        return int(text)
    found: list[int] = []
    for part in text.replace(" ", "").strip("()").split("+"):
        values, _, times = part.partition("*")
        if not (values.startswith("[") and values.endswith("]")):
            raise ValueError(
                f"--moe-layer-freq {text!r} has a wrong format: write it like 2 or [0]*3+[1]*58"
            )
        found += [int(x) for x in values[1:-1].split(",")] * int(times or 1)
    return found


# --- entries ---


def query_key_value(settings: Settings, fused: bool = False) -> QueryKeyValue:
    """Return the layout of query, key and value, which are one tensor in the checkpoint if
    ``fused``.
    """
    groups = settings["num_query_groups"]
    heads_per_group = settings["num_attention_heads"] // groups
    gated = bool(settings.get("attention_output_gate"))
    return QueryKeyValue(
        groups=groups,
        heads_per_group=heads_per_group,
        dim=settings["kv_channels"],
        gated=gated,
        fused=fused,
    )


def attention_entries(settings: Settings, index: int, prefix: str = "model.") -> list[Entry]:
    """Return the entries of attention: fused query, key and value with biases and norms if any, and
    the output.
    """
    hf = f"{prefix}layers.{index}.self_attn."
    megatron = f"decoder.layers.{index}.self_attention."
    qkv = query_key_value(settings)
    names = [f"{hf}{x}_proj" for x in "qkv"]
    entries = [
        Entry(f"{megatron}linear_qkv.weight", tuple(f"{name}.weight" for name in names), qkv)
    ]
    if settings.get("add_qkv_bias"):
        entries.append(
            Entry(f"{megatron}linear_qkv.bias", tuple(f"{name}.bias" for name in names), qkv)
        )
    entries.append(Entry(f"{megatron}linear_proj.weight", (f"{hf}o_proj.weight",), COLUMNS))
    if settings.get("qk_layernorm"):
        layout = ROWS if settings.get("qk_norm_over_heads") else REPLICATED
        entries += [
            Entry(f"{megatron}{x}_layernorm.weight", (f"{hf}{x}_norm.weight",), layout)
            for x in "qk"
        ]
    return entries


def norm_entries(index: int, prefix: str = "model.") -> list[Entry]:
    """Return the entries of the norms before attention and before the MLP."""
    hf = f"{prefix}layers.{index}."
    megatron = f"decoder.layers.{index}."
    return [
        Entry(f"{megatron}input_layernorm.weight", (f"{hf}input_layernorm.weight",)),
        Entry(f"{megatron}pre_mlp_layernorm.weight", (f"{hf}post_attention_layernorm.weight",)),
    ]


def mlp_entries(hf: str, megatron: str, fused: bool = False) -> list[Entry]:
    """Return the entries of a SwiGLU MLP. ``fused``: the checkpoint, too, has gate and up
    projection in one matrix.
    """
    names = ("gate_up_proj",) if fused else ("gate_proj", "up_proj")
    return [
        Entry(
            f"{megatron}linear_fc1.weight",
            tuple(f"{hf}{x}.weight" for x in names),
            Stacked(fused=fused),
        ),
        Entry(f"{megatron}linear_fc2.weight", (f"{hf}down_proj.weight",), COLUMNS),
    ]


def expert_entries(settings: Settings, hf: str, megatron: str) -> list[Entry]:
    """Return the entries of router and experts. The prefixes ``hf`` and ``megatron`` end with
    ``mlp.``.
    """
    count = settings["num_experts"]
    expert = f"{hf}experts.{{expert}}."
    entries = [Entry(f"{megatron}router.weight", (f"{hf}gate.weight",))]
    if settings.get("moe_router_enable_expert_bias"):
        entries.append(
            Entry(f"{megatron}router.expert_bias", (f"{hf}gate.e_score_correction_bias",))
        )
    gate_up = (f"{expert}gate_proj.weight", f"{expert}up_proj.weight")
    entries.append(Entry(f"{megatron}experts.gate_up", gate_up, Stacked(), experts=count))
    entries.append(
        Entry(f"{megatron}experts.down", (f"{expert}down_proj.weight",), COLUMNS, experts=count)
    )
    if settings.get("moe_shared_expert_intermediate_size"):
        entries += mlp_entries(f"{hf}shared_experts.", f"{megatron}shared_experts.")
    return entries


def decoder_layer(settings: Settings, index: int, prefix: str = "model.") -> list[Entry]:
    """Return the entries of a common layer: norms, grouped-query attention, and an MLP or
    experts.
    """
    hf = f"{prefix}layers.{index}.mlp."
    megatron = f"decoder.layers.{index}.mlp."
    here = (
        expert_entries(settings, hf, megatron)
        if moe_layers(settings)[index]
        else mlp_entries(hf, megatron)
    )
    return [*norm_entries(index, prefix), *attention_entries(settings, index, prefix), *here]


def get_family(model_type: str, model_name: str | None = None) -> Family:
    """Return the family of a ``model_type``.

    Args:
        model_name: ``--model-name``. If it is a family or a model type that has a map, it is used
            instead. Any other name, such as ``qwen3-4B``, has no effect on a ``model_type`` that
            has a map.

    Raises:
        ValueError: There is no map for it. The error lists the families.
    """
    for wanted in (model_name, model_type):
        for name in parts("model family"):
            family: Family = find("model family", name)
            if wanted is not None and (wanted == family.name or wanted in family.model_types):
                return family
    raise ValueError(
        f"there is no Megatron map for the model type {model_type!r}, only for "
        f"{', '.join(parts('model family'))}: use --train-backend fsdp, or give --model-name of a "
        "family with the same architecture"
    )


def not_divided(config: HfConfig, layout: ParallelLayout) -> str | None:
    """Return why the model of a config.json cannot have a parallel layout, and what to do; None if
    it can.
    """
    heads = config.get("linear_num_key_heads")
    if not heads or heads % (layout.tp * layout.cp) == 0:
        return None
    return (
        f"--tensor-model-parallel-size {layout.tp} and --context-parallel-size {layout.cp} "
        f"together divide the {heads} key heads of gated delta nets (linear_num_key_heads in "
        f"config.json): {layout.tp} · {layout.cp} must be a divisor of {heads}"
    )


def text_config(checkpoint: str | Path, trust_remote_code: bool = False) -> PretrainedConfig:
    """Return the config of the text model of a checkpoint. If it also has a vision part, the config
    says so (:data:`WITH_VISION`).
    """
    whole = load_hf_config(str(checkpoint), trust_remote_code)
    text = whole.get_text_config()
    if text is not whole:
        text.tie_word_embeddings = whole.tie_word_embeddings  # the whole model decides
        setattr(text, WITH_VISION, True)
    return text


def family_of(config: PretrainedConfig, model_name: str | None = None) -> Family:
    """Return the family of a transformers config; ``model_name`` as in :func:`get_family`."""
    return get_family(config.model_type, model_name)
