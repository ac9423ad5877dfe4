"""Load Hugging Face models, for the trainer and the embedded engine, and find their parts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import is_zipfile

import torch
import transformers
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)

from slime.models.cpu_kernels import use_onednn_linears
from slime.models.expected import compare, from_loading_info, notices, quiet, require_fit
from slime.models.shards import (
    UNTIES,
    ModelError,
    local_folder,
    own_head,
    read_headers,
    require_hub,
    resolve_folder,
    shorten,
)
from slime.models.stored import NamedWeights, StoredWeights, is_finite

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig


VISION_TOWERS = ("visual", "vision_tower", "vision_model", "vision_embed_tokens")


def backbone_of(model: PreTrainedModel) -> nn.Module:
    """Return the model without its head. ``base_model`` of Llama 4 is the model with its head."""
    backbone: nn.Module = model.base_model
    if backbone is model:
        backbone = model.get_submodule("model")
    return backbone


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the layers of the language model: the longest list of layers outside a vision
    tower.
    """
    names = set(model._no_split_modules or [])
    vision = {
        id(m)
        for name, tower in model.named_modules()
        if name.split(".")[-1] in VISION_TOWERS
        for m in tower.modules()
    }
    lists = [
        m
        for m in model.modules()
        if isinstance(m, nn.ModuleList) and len(m) and id(m) not in vision
    ]
    named = [m for m in lists if type(m[0]).__name__ in names]
    return max((list(m) for m in named or lists), key=len)


@contextmanager
def one_layer_of_each_kind(model: PreTrainedModel) -> Iterator[None]:
    """Let a model have only its first decoder layers within the context: as few as contain each
    kind of layer.

    What is checked on them holds for all layers, and neither the memory nor the time of a large
    model is needed.
    """
    layers = decoder_layers(model)
    first: dict[str, int] = {}
    for number, layer in enumerate(layers):
        first.setdefault(_kind(layer), number)
    where = [
        (module, name, child)
        for module in model.modules()
        for name, child in module.named_children()
        if isinstance(child, nn.ModuleList) and list(child) == layers
    ]
    for module, name, _ in where:
        module._modules[name] = nn.ModuleList(layers[: max(first.values()) + 1])
    try:
        yield
    finally:
        for module, name, child in where:
            module._modules[name] = child


def _kind(layer: nn.Module) -> str:
    """Return a value that is equal for layers with the same modules and settings, whatever their
    weights.
    """
    found: list[object] = []
    for module in layer.modules():
        found += [
            type(module).__name__,
            sorted(item for item in vars(module).items() if _is_setting(*item)),
        ]
    return repr(found)


def _is_setting(name: str, value: object) -> bool:
    is_place = "idx" in name or "index" in name or name in ("layer_id", "layer_number")
    return (
        isinstance(value, bool | int | float | str | None)
        and not name.startswith("_")
        and not is_place
    )


def load_hf_config(path: str | Path, trust_remote_code: bool = False) -> Any:
    """Load the config of a model from a local folder or a hub id.

    Raises:
        ModelError: The path looks like a local folder, but has no ``config.json``; or the hub does
            not give the model.
    """
    folder = Path(path).expanduser()
    local = folder.exists() or str(path).startswith((".", "/", "~"))
    if local and not (folder / "config.json").is_file():
        what = "has no config.json" if folder.is_dir() else "does not exist"
        raise ModelError(
            f"model folder {str(path)!r} {what}; --hf-checkpoint takes a Hugging Face folder or a "
            "hub id"
        )
    if not local:
        require_hub(str(path))
    return AutoConfig.from_pretrained(
        str(folder) if local else str(path), trust_remote_code=trust_remote_code
    )


def is_multimodal(config: PretrainedConfig) -> bool:
    """Whether the checkpoint is a vision-language model."""
    return getattr(config, "vision_config", None) is not None


def plain_attention(config: PretrainedConfig) -> str:
    """Return the attention of transformers that computes a model exactly: SDPA, or eager.

    Some models do not have SDPA, and with soft-capped scores (Gemma 2) it would leave out the cap
    without an error.
    """
    if getattr(config.get_text_config(), "attn_logit_softcapping", None):
        return "eager"
    auto: Any = AutoModelForImageTextToText if is_multimodal(config) else AutoModelForCausalLM
    known = type(config) in auto._model_mapping  # a model whose code is in the checkpoint is not
    return "sdpa" if not known or auto._model_mapping[type(config)]._supports_sdpa else "eager"


def plain_config(config: PretrainedConfig) -> PretrainedConfig:
    """Remove ``quantization_config`` from a config, because the weights are dequantized when they
    are read.
    """
    for part in (config, config.get_text_config()):
        for name in ("quantization_config", "compression_config"):
            if hasattr(part, name):
                delattr(part, name)
    return config


def empty_model(config: PretrainedConfig, **more: object) -> PreTrainedModel:
    """Build a causal language model (image-text-to-text if the config has ``vision_config``) on
    ``meta``.

    Raises:
        ModelError: This release of transformers would compute other positions than config.json asks
            for.
    """
    auto: Any = AutoModelForImageTextToText if is_multimodal(config) else AutoModelForCausalLM
    with torch.device("meta"):
        model: PreTrainedModel = auto.from_config(config, **more)
    _require_rotary(model, config.get_text_config())
    return model


def _require_rotary(model: PreTrainedModel, config: PretrainedConfig) -> None:
    """Refuse a model with one rotary embedding for all layers if config.json asks for one per kind
    of layer.

    Releases of transformers before 5.13 build OLMo-3 so, with a warning about unknown keys or none.
    Its published config.json has one set of parameters, of which YaRN is only for the layers with
    full attention.
    """
    asked = getattr(config, "rope_parameters", None) or {}
    kinds = set(getattr(config, "layer_types", None) or ())
    per_kind = any(isinstance(asked.get(kind), dict) for kind in kinds)
    scaled_in_part = config.model_type == "olmo3" and asked.get("rope_type", "default") != "default"
    computed = {name.rpartition(".")[2] for name, _ in model.named_buffers()}
    if (per_kind or scaled_in_part) and not any(f"{kind}_inv_freq" in computed for kind in kinds):
        raise ModelError(
            f"config.json has different rotary embeddings for {' and '.join(sorted(kinds))} "
            f"layers, but transformers {transformers.__version__} computes one for all layers of "
            f"{config.model_type}; a newer release may compute both (5.13 does for OLMo-3)"
        )


def check_checkpoint(
    path: str | Path, trust_remote_code: bool = False, by_transformers: bool = False
) -> list[str]:
    """Compare a checkpoint's files with the model that its config.json describes. Only headers are
    read.

    A hub id that is not downloaded yet is not checked here but when it is loaded; so are the shapes
    of tensors in PyTorch's older file format.

    Args:
        by_transformers: The run uses the model of transformers, so it is an error if transformers
            cannot build it. Otherwise that is only a notice.

    Returns:
        Notices, without their subject, which is the checkpoint.

    Raises:
        ModelError: As :func:`load_hf_model`, except for values that are not finite.
    """
    folder = local_folder(path)
    if folder is None:
        return []
    _generation_config(folder)
    headers = read_headers(folder)
    if not headers and any(folder.glob("*.bin*")):
        _check_pickles(folder)
        return []
    stored = StoredWeights(folder)
    try:
        config = plain_config(load_hf_config(folder, trust_remote_code))
    # a wrong file can raise anything in transformers or in the model's own code
    except Exception as error:
        raise ModelError(
            f"transformers cannot read {folder / 'config.json'}: {type(error).__name__}: "
            f"{str(error).replace('the argument `trust_remote_code=True`', '--trust-remote-code')}"
        ) from error
    layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    if isinstance(layers, int) and layers > len(headers):
        # Also without memory for their weights, billions of layers would be built until the machine
        # has none left.
        raise ModelError(
            f"{folder / 'config.json'} says num_hidden_layers {layers}, but the checkpoint has only "
            f"{len(headers)} tensors"
        )
    try:
        model = empty_model(config, trust_remote_code=trust_remote_code, dtype=torch.float32)
    # as above; an engine or Megatron may know the architecture all the same
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        if by_transformers:
            raise ModelError(
                f"transformers cannot build the model of {folder / 'config.json'}: {reason}"
            ) from error
        return [f"was not compared with the model, which transformers cannot build ({reason})"]
    differences = compare(model, stored)
    require_fit(str(folder), model, differences)
    head = own_head(folder, headers) if getattr(model, "all_tied_weights_keys", None) else None
    untied = [] if head is None else [f'{UNTIES}: {head}. Set "tie_word_embeddings": false there']
    return [*untied, *notices(differences)]


def load_hf_model(
    path: str | Path,
    dtype: torch.dtype,
    device: torch.device | str,
    attn_implementation: str | dict[str, str] = "sdpa",
    trust_remote_code: bool = False,
    weights: NamedWeights | None = None,
) -> PreTrainedModel:
    """Load a causal language model, or an image-text-to-text model if the config has
    ``vision_config``.

    The weights of quantized checkpoints (:mod:`slime.models.quantized`) are dequantized, and the
    config of the model then has no ``quantization_config``. No parameter is initialized at random.

    Args:
        path: A Hugging Face folder, or a hub id.
        dtype: The dtype of all parameters, whatever that of the checkpoint is. In float32 on the
            CPU, linear layers use oneDNN if that is faster (``cpu_kernels.py``).
        device: The device of the parameters. With ``meta``, only the config is read.
        attn_implementation: A name that transformers' AttentionInterface knows, or one for each
            sub-config.
        weights: The weights to load; None for those of ``path``, which otherwise only describes the
            model.

    Returns:
        The model in eval mode. The caller decides whether to use a KV cache.

    Raises:
        ModelError: The folder does not exist, a file is damaged, a tensor of the model is missing
            or has another shape, or values are not finite. The message names files and tensors.
    """
    config = plain_config(load_hf_config(path, trust_remote_code))
    common: dict[str, object] = dict(dtype=dtype, attn_implementation=attn_implementation)
    model = empty_model(config, trust_remote_code=trust_remote_code, **common)
    if torch.device(device).type != "meta":
        model = _with_weights(model, path, config, common, trust_remote_code, weights)
        model.to(device)  # type: ignore[arg-type]
    if torch.device(device).type in ("cpu", "meta") and dtype == torch.float32:
        use_onednn_linears(model)
    _train_whole_embeddings(model)
    model.eval()
    return model


def _with_weights(
    empty: PreTrainedModel,
    path: str | Path,
    config: PretrainedConfig,
    common: dict[str, object],
    trust_remote_code: bool,
    weights: NamedWeights | None,
) -> PreTrainedModel:
    """Return the model with the weights of the checkpoint, on the CPU."""
    from transformers import GenerationConfig

    folder = resolve_folder(path)
    common = {
        "config": config,
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,
        **common,
    }
    if weights is None and not read_headers(folder):
        # PyTorch's older format: transformers reads it, without running code.
        auto: Any = AutoModelForImageTextToText if is_multimodal(config) else AutoModelForCausalLM
        # of the hub, nothing is here yet
        source = str(folder) if folder == Path(path).expanduser() else str(path)
        if source == str(folder) and not any(folder.glob("*.bin*")):
            raise ModelError(f"checkpoint {folder} has no weights (*.safetensors)")
        _check_pickles(folder)
        model, info = auto.from_pretrained(source, trust_remote_code=trust_remote_code, **common)
        require_fit(source, model, from_loading_info(model, info))
        return _finite(model, source)
    # The names are compared before any value is read. What transformers reports after it has loaded
    # the values is checked as well, because it initializes at random what it does not find.
    stored = weights or StoredWeights(folder)
    require_fit(str(stored.folder), empty, compare(empty, stored))
    generation = _generation_config(folder) or GenerationConfig.from_model_config(config)
    common |= {"state_dict": stored.lazy(), "generation_config": generation}
    architecture: Any = type(empty)
    try:
        with quiet():
            model, info = architecture.from_pretrained(None, **common)
    except Exception as error:
        # transformers raises its own error instead of that of a reading thread
        if stored.fault is not None:
            raise stored.fault from error
        raise
    model.config.name_or_path = str(folder)
    require_fit(str(stored.folder), model, from_loading_info(model, info))
    return model


def _generation_config(folder: Path) -> GenerationConfig | None:
    """Return what generation_config.json says; None if there is no such file.

    Raises:
        ModelError: transformers refuses to load the file. It loads some files that it would refuse
            to save.
    """
    from transformers import GenerationConfig

    file = folder / "generation_config.json"
    if not file.is_file():
        return None
    try:
        return GenerationConfig.from_pretrained(folder)
    except Exception as error:  # a wrong value can raise anything
        what = " ".join(str(error).split())[:300]
        raise ModelError(
            f"transformers cannot read {file}: {what}. Correct or remove the file"
        ) from error


def _check_pickles(folder: Path) -> None:
    """Refuse weights in PyTorch's older format that cannot be read without running code. No tensor
    is read.

    Raises:
        ModelError: There is such a file.
    """
    for file in sorted(folder.glob("pytorch_model*.bin")):
        try:
            torch.load(file, map_location="meta", weights_only=True, mmap=is_zipfile(file))
        except Exception as error:  # of a damaged file, anything
            what = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
            advice = "Download it again, or use the model's safetensors files"
            raise ModelError(
                f"{file} does not hold plain tensors and is not loaded ({what}). {advice}"
            ) from error


def _finite(model: PreTrainedModel, where: str) -> PreTrainedModel:
    wrong = [name for name, tensor in model.state_dict().items() if not is_finite(tensor)]
    if wrong:
        raise ModelError(f"checkpoint {where} has NaN or infinite values: {shorten(wrong)}")
    return model


def _train_whole_embeddings(model: PreTrainedModel) -> None:
    """Give the padding token's row a gradient, too.

    transformers marks it as ``padding_idx``, which leaves it out of the gradient. In many models
    that token is also the end-of-sequence token, which samples contain. What pads a batch here has
    no gradient anyway: no token attends to it, and no loss looks at it. Megatron's embedding has no
    such exception.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            module.padding_idx = None
