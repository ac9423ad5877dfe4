"""Build this rank's part of the model, load its weights, and wrap it in Megatron's gradient
buffers.
"""

from __future__ import annotations

from pathlib import Path

import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from torch import Tensor, nn

from slime.backends.tensor_shards import StoredTensors
from slime.backends.trainable import lora_settings, select_trainable
from slime.config.algorithm import registered_loss
from slime.config.args import Args
from slime.config.hf_config import megatron_folder
from slime.config.layout import ParallelLayout
from slime.config.run import InitialWeights, other_folder
from slime.config.seeds import derive_seed
from slime.models.layer_kinds import freeze_untrained
from slime.models.loading import check_checkpoint
from slime.plugins.megatron import rank_files, rotary
from slime.plugins.megatron.config import ddp_config, merged_settings, transformer_config
from slime.plugins.megatron.core import MegatronError
from slime.plugins.megatron.flags import adapter_problems
from slime.plugins.megatron.lora import ModelAdapters
from slime.plugins.megatron.maps.family import family_of, moe_layers, not_divided, text_config
from slime.plugins.megatron.megatron_lm import read_megatron_lm
from slime.plugins.megatron.mixers import Indexers, delta_nets
from slime.plugins.megatron.model import PolicyModel, build_chunk, unwrapped, with_gradient
from slime.plugins.megatron.routing import RoutingReplay
from slime.plugins.megatron.shards import weight_shards
from slime.plugins.megatron.torch_dist import RANK_FILES, TENSORS, adapter_only, read_meta
from slime.plugins.megatron.weights import ModelWeights
from slime.weights.hf_folder import HfFolder


class TrainedModel:
    """The model chunks of a rank with their weights, and the configuration of the whole model.

    Attributes:
        chunks: One model chunk, or several with interleaved pipelines.
        valued: Whether the model has a value head, as that of a critic or a reward model.
        adapters: The adapters (LoRA); None if the weights themselves are trained.
        has_state: Whether layers have a state, so that packs must list their sequences.
        routing: The routing replay; None without ``--use-routing-replay`` or without experts, and
            for a critic.
    """

    def __init__(
        self, args: Args, role: str, layout: ParallelLayout, rank: int, device: torch.device
    ) -> None:
        self.args = args
        self.role = role
        self.layout = layout
        self.rank = rank
        self.device = device
        # The shape: config.json decides, and the user's flags may add what it does not say.
        self.hf_config = text_config(args.hf_checkpoint, args.trust_remote_code)
        self.family = family_of(self.hf_config, args.model_name)
        if problem := not_divided(self.hf_config.to_dict(), layout):
            raise MegatronError(problem)
        self.settings = merged_settings(
            args.megatron, args.hf_checkpoint, self.family, self.hf_config
        )
        self.config = transformer_config(args, self.settings, layout, device)
        stages = range(layout.vpp) if layout.vpp > 1 else (None,)
        nets = delta_nets(self.hf_config, self.family, self.settings)
        types = self.settings.get("indexer_types")
        indexers = Indexers(self.hf_config, types) if types else None
        self.has_state = nets is not None
        latent = self.config.multi_latent_attention
        scaled = None if latent else rotary.scaled_frequencies(self.hf_config)
        windowed = None if latent else rotary.window_frequencies(self.hf_config)
        loss = registered_loss(args)
        self.valued = role == "critic" or (loss is not None and loss.scores_responses)
        # One model chunk, or several with interleaved pipelines. They have no values yet.
        models = [
            build_chunk(
                self.config,
                self.settings,
                self.valued,
                stage,
                derive_seed(args.seed, "value head"),
                scaled,
                windowed,
                nets,
                indexers,
            )
            for stage in stages
        ]
        self.weights = ModelWeights(models, self.family, self.settings, self.valued)
        self.chunks = models
        # Weights are read and frozen before the gradient buffers are created, because these have
        # room only for parameters that are trained.
        self.initial = InitialWeights.of(args, args.hf_checkpoint)
        self.read_weights(self.initial.path(megatron=True))
        self._freeze(models)
        # Adapters are added after the base is read, and freeze it.
        self.adapters = self._added_adapters(models)
        # Routing replay hooks the routers of the plain modules, before the gradient buffers wrap
        # them.
        self.routing: RoutingReplay | None = None
        if args.use_routing_replay and role == "actor" and self.settings.get("num_experts"):
            self.routing = RoutingReplay(
                models,
                moe_layers(self.settings),
                self.config.sequence_parallel,
                bool(args.use_rollout_routing_replay),
            )
        self._wrap(models)

    def _freeze(self, models: list[PolicyModel]) -> None:
        """Freeze what the flags leave out of training."""
        args = self.args
        names = self.weights.hf_names
        select_trainable(
            [(x, names(name)) for name, x in self.weights.tensors() if isinstance(x, nn.Parameter)],
            self.weights.all_hf_names(),
            args.only_train_params_name_list,
            args.freeze_params_name_list,
            "output_layer." if self.valued else None,
        )
        for model in models:
            freeze_untrained(model)

    def _added_adapters(self, models: list[PolicyModel]) -> ModelAdapters | None:
        """Add the adapters that the flags ask for; None without any."""
        args = self.args
        lora = lora_settings(args)
        if lora is not None or self.config.recompute_granularity is not None:
            # Megatron's checkpoints pass no gradient to their layers if the input has none, and its
            # schedules then skip the backward pass of a stage.
            for model in models:
                if model.pre_process:
                    model.embedding.register_forward_hook(with_gradient)
        if lora is None:
            return None
        if problems := adapter_problems(self.hf_config.to_dict(), self.layout.tp):
            raise MegatronError("; ".join(problems))
        load = args.load if self.role == "actor" else None
        return ModelAdapters(models, self.weights, lora, args.seed, load)

    def _wrap(self, models: list[PolicyModel]) -> None:
        """Give the model chunks Megatron's gradient buffers, and set how its schedules sum
        gradients.
        """
        ddp = ddp_config(self.args.megatron)
        self.chunks = [
            # Megatron does the same: the reductions of later chunks overlap with the computation of
            # other chunks anyway, so later chunks need no buckets.
            DistributedDataParallel(self.config, ddp, model, disable_bucketing=i > 0)
            for i, model in enumerate(models)
        ]
        self.lazy_gather = bool(ddp.overlap_param_gather)
        # Megatron's schedules read these hooks from the config. The loss is not scaled, because
        # bfloat16 has the same range of exponents as float32.
        self.config.grad_scale_func = None
        self.config.finalize_model_grads_func = _sum_gradients
        if ddp.overlap_grad_reduce:
            # Otherwise the first micro-batch of a step would start to reduce gradients to which
            # later micro-batches still add.
            waits = [chunk.no_sync for chunk in self.chunks]
            self.config.no_sync_func = waits if len(waits) > 1 else waits[0]

    @property
    def pad_multiple(self) -> int:
        """The number of tokens on a rank is padded to a multiple of this."""
        multiple = self.layout.tp if self.config.sequence_parallel else 1
        if self.device.type == "cuda":  # kernels are reused if there are fewer different shapes
            multiple *= -(-self.args.data_pad_size_multiplier // (multiple * self.layout.cp))
        return max(multiple, 1)

    def read_weights(self, path: str) -> None:
        """Read a Hugging Face folder, or a Megatron checkpoint of any layout, into the
        parameters.
        """
        folder = megatron_folder(path)
        if foreign := other_folder(path):
            self.weights.load(read_megatron_lm(foreign, self.family, self.hf_config.to_dict()))
        elif folder is None:
            if self.rank == 0:  # the driver could check the folder only if it had the files
                check_checkpoint(path, self.args.trust_remote_code)
            self.weights.load(HfFolder(path))
        else:
            load_weights(self, folder)

    def finish_gather(self) -> None:
        """Complete the last update of this rank's weights.

        With ``--overlap-param-gather``, updated weights are gathered only when they are next used.
        Call this method before weights are read or replaced outside of a training pass.
        """
        if self.lazy_gather:
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)

    def drop_gradients(self) -> None:
        """Free the memory of the gradient buffers. The tensors remain, because Megatron has views
        of them.
        """
        for buffer in self._gradient_buffers():
            buffer.untyped_storage().resize_(0)

    def restore_gradients(self) -> None:
        for buffer in self._gradient_buffers():
            buffer.untyped_storage().resize_(buffer.numel() * buffer.element_size())
            buffer.zero_()

    def _gradient_buffers(self) -> list[Tensor]:
        if self.device.type != "cuda":
            return []
        return [
            b.grad_data
            for chunk in self.chunks
            for b in (*chunk.buffers, *chunk.expert_parallel_buffers)
        ]


def load_weights(
    model: TrainedModel, path: Path, part: str | None = None, adapter: bool = False
) -> None:
    """Read the weights of a Megatron checkpoint, or those of a copy in its folder ``part``, into
    the parameters.

    Args:
        adapter: Whether the checkpoint has only an adapter (LoRA), which is read into that of the
            model.
    """
    meta = read_meta(path)
    if not adapter and (problem := adapter_only(path, meta)):
        raise MegatronError(problem)
    if meta["ckpt_format"] == "torch":
        states = rank_files.read_weights(
            path / (part or RANK_FILES), meta["layout"], layout_sizes(model.layout)
        )
        for chunk, state in zip(model.chunks, states, strict=True):
            try:
                unwrapped(chunk).load_state_dict(state)
            except RuntimeError as error:
                raise MegatronError(
                    f"{path} was saved with --ckpt-format torch by a run whose pipeline stages "
                    "had other layers: give the same --decoder-first-pipeline-num-layers and the "
                    "like as that run"
                ) from error
    else:
        try:
            StoredTensors(path / (part or TENSORS)).read(weight_shards(model.chunks, adapter))
        except ValueError as error:
            raise MegatronError(str(error)) from error


def layout_sizes(layout: ParallelLayout) -> dict[str, int]:
    return {
        name: getattr(layout, name) for name in ("world_size", "tp", "pp", "cp", "ep", "etp", "vpp")
    }


def _sum_gradients(
    chunks: list[DistributedDataParallel], num_tokens: Tensor | None = None, **kwargs: object
) -> None:
    """Sum gradients over ranks. Megatron would divide them by ``num_tokens``, but the shares of the
    loss are already divided by the number of tokens or samples in the step."""
    finalize_model_grads(chunks, None, **kwargs)
