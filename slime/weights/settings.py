"""The settings of weight syncs, taken from the flags."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from slime.config.cluster import inline_engine
from slime.config.flag import own_section
from slime.config.hf_config import model_config
from slime.config.hooks import load_function
from slime.config.lora import FUSED, engine_adapter
from slime.config.weight_sync import WeightSyncConfig, transport_part
from slime.engines.launch import fp8_format
from slime.models.fp8_format import Fp8Format

if TYPE_CHECKING:
    from slime.config.args import Args
    from slime.engines.handle import EngineHandle
    from slime.engines.payload import NamedTensor

# part of --distributed-timeout-minutes: the other ranks wait in a collective for the sending one
_RANKS_MARGIN = 0.8
# part of --phase-timeout: a sync must end with its own error before the driver gives up
_DRIVER_MARGIN = 0.9

UNTIED = (
    "Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM", "GptOssForCausalLM", "MiniMaxM2ForCausalLM", "MixtralForCausalLM",
    "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM",
)  # fmt: skip
"""Classes of SGLang (0.5.15 and 0.5.23) that ignore ``tie_word_embeddings``: their output layer is
always a tensor of its own, which a tied checkpoint leaves uninitialized."""

Written = Callable[[Path, Sequence["EngineHandle"]], object]
"""Called with the folder of a version and the engines, before the engines load it."""


@dataclass(frozen=True)
class AdapterSync:
    """What a trainer of an adapter (LoRA) sends.

    Attributes:
        changing: The names of the tensors that training changes. Engines that hold a version of
            this run need only these.
        config: The content of PEFT's ``adapter_config.json`` with the whole names of the layers, if
            the factors of the adapter are sent. None if it is merged into the weights.
    """

    changing: frozenset[str]
    config: Mapping[str, object] | None


@dataclass(frozen=True)
class AdapterSource:
    """The factors of an adapter (LoRA), with which all ranks can leave out the base together.

    Attributes:
        factors: The last tensors of the whole stream. Iterating may be a collective operation.
        any_rank: Returns whether its argument is True on any rank. This is a collective operation.
    """

    factors: Iterable[NamedTensor]
    any_rank: Callable[[bool], bool]


@dataclass(frozen=True)
class WeightSyncSettings:
    """The settings of the weight syncs of one training process.

    Attributes:
        model: ``--hf-checkpoint``, a folder or a hub id.
        sync: The flags of weight syncs.
        disk_dir: ``--update-weight-disk-dir`` as an absolute path.
        own: The flags that the transport itself brings; None if it has none.
        train_dtype, rollout_dtype: Names of dtypes such as ``bfloat16``.
        only_train, freeze: Regular expressions for parameter names.
        engines_lose_weights: Whether engines lose their weights while their memory is released, so
            that frozen tensors must be sent each time. SGLang does; the embedded engine keeps them
            in host memory.
        step_seconds: The time limit of one step of a sync (one bucket on all engines, or one
            control call).
        phase_seconds: ``--phase-timeout``.
        untied_engines: Whether engines hold the output layer as a tensor of its own although the
            model ties it to the input embedding.
        fp8: How the weights are quantized (``--rollout-quantization fp8``); None if they are not.
        adapter: The description of an adapter whose factors are sent (see :class:`AdapterSync`);
            None to send weights.
        same_process: Whether the only engine is in this process (``--inline``).
        adapter_name: The name under which engines load the adapter and requests ask for it. None
            for engines that apply the adapter of the last update to every request.
        adapter_of_sglang: Whether SGLang reads the adapter's description (:func:`sglang_adapter`).
        on_written: The function of ``--custom-update-weight-post-write-path``, with its argument
            ``args`` bound.
    """

    model: str
    colocate: bool
    sync: WeightSyncConfig
    disk_dir: str | None
    train_dtype: str | None
    rollout_dtype: str | None
    only_train: tuple[str, ...]
    freeze: tuple[str, ...]
    engines_lose_weights: bool
    step_seconds: float
    phase_seconds: float
    on_written: Written | None = None
    adapter: Mapping[str, object] | None = None
    adapter_name: str | None = None
    adapter_of_sglang: bool = False
    fp8: Fp8Format | None = None
    untied_engines: bool = False
    same_process: bool = False
    own: object = None

    def for_adapter(self, sent: AdapterSync | None) -> WeightSyncSettings:
        """Return the settings for a trainer of an adapter; with None, these settings.

        Raises:
            ValueError: Engines that load adapters by name cannot have an adapter on these layers.
        """
        if sent is None:
            return self
        changing = f"^(?:{'|'.join(map(re.escape, sorted(sent.changing)))})$"
        config = sent.config
        sync = self.sync
        if self.adapter_name is not None and config is not None:
            config = sglang_adapter(config) if self.adapter_of_sglang else config
            # engines replace an adapter only when no request has it any more
            sync = replace(sync, update_weight_pause_mode="abort")
        return replace(self, only_train=(changing,), adapter=config, sync=sync)

    @classmethod
    def from_args(cls, args: Args) -> WeightSyncSettings:
        named = engine_adapter(args.lora_rank, args.lora_sync, args.rollout_backend)
        hook = args.custom_update_weight_post_write_path
        return cls(
            model=str(args.hf_checkpoint),
            colocate=args.colocate,
            sync=args.section(WeightSyncConfig),
            disk_dir=os.path.abspath(args.update_weight_disk_dir)
            if args.update_weight_disk_dir
            else None,
            train_dtype=args.train_dtype,
            rollout_dtype=args.rollout_dtype,
            only_train=tuple(args.only_train_params_name_list or ()),
            freeze=tuple(args.freeze_params_name_list or ()),
            # With an adapter that it loads by name, SGLang keeps a copy of its base in host memory.
            engines_lose_weights=bool(args.offload_rollout)
            and args.rollout_backend == "sglang"
            and named is None,
            step_seconds=min(
                args.distributed_timeout_minutes * 60.0 * _RANKS_MARGIN,
                args.phase_timeout * _DRIVER_MARGIN,
            ),
            phase_seconds=float(args.phase_timeout),
            # loaded by the rank that writes
            on_written=None
            if hook is None
            else lambda folder, engines: load_function(hook)(args, str(folder), engines),
            adapter_name=named,
            adapter_of_sglang=args.rollout_backend == "sglang",
            same_process=inline_engine(args) is not None,
            fp8=fp8_format(
                args, args.rollout_backend, args.hf_checkpoint, args.rollout_num_gpus_per_engine
            ),
            untied_engines=args.rollout_backend == "sglang" and _is_untied(str(args.hf_checkpoint)),
            own=own_section(transport_part(args), args),
        )


def sglang_adapter(config: Mapping[str, object]) -> dict[str, object]:
    """Return PEFT's ``adapter_config.json`` in the form from which SGLang computes the same factor.

    SGLang divides ``lora_alpha`` by the rank and does not know rsLoRA, so the file gets the
    ``lora_alpha`` with which the quotient is right.

    Args:
        config: The configuration with the whole names of the layers.

    Raises:
        ValueError: In some decoder layer, not all projections that SGLang computes at once have an
            adapter.
    """
    layers = [str(name) for name in cast("Sequence[object]", config["target_modules"])]
    # SGLang computes the projections of a group in one matrix, so a group has all of its adapters
    # or none.
    places: dict[str, set[str]] = {}
    for name in layers:
        module, _, last = name.rpartition(".")
        places.setdefault(module, set()).add(last)
    for module, names in places.items():
        for group in FUSED:
            if names & set(group) and not names >= set(group):
                raise ValueError(
                    f"--lora-sync adapter: {module} has adapters on "
                    f"{', '.join(sorted(names & set(group)))}, but SGLang needs them on all of "
                    f"{', '.join(group)} or on none: change --lora-target-modules and "
                    "--lora-exclude-modules, or use --lora-sync merged"
                )
    # With rsLoRA the factor is alpha / sqrt(rank); SGLang computes alpha / rank.
    rank = int(str(config["r"]))
    alpha = float(str(config["lora_alpha"]))
    return {
        **config,
        "lora_alpha": alpha * rank**0.5 if config.get("use_rslora") else alpha,
        "use_rslora": False,
    }


def _is_untied(model: str) -> bool:
    config = model_config(model)
    return bool(config.get("tie_word_embeddings")) and bool(
        set(config.get("architectures") or ()) & set(UNTIED)
    )
