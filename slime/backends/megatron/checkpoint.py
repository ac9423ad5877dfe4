"""Training state in torch's distributed checkpoint format (``torch_dist``), which any parallel
layout can load.

A folder has ``trainer.json`` (layout, shape and flags, which converters need), the tensors of model
and optimizer, one folder per copy of the weights, and the random state of each rank. Names are
those of megatron-core. Layers are numbered as in the whole model, so names do not depend on
pipeline stages and interleaving. Every rank writes its part of every tensor
(:mod:`~slime.backends.megatron.shards`). With ``--ckpt-format torch``, each rank writes its tensors
to separate files instead (:mod:`~slime.backends.megatron.rank_files`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from slime.backends.bank import WeightBank
from slime.backends.megatron import rank_files
from slime.backends.megatron.core import MegatronError
from slime.backends.megatron.model import Chunk, unwrapped
from slime.backends.megatron.optimizer import ScheduledOptimizer
from slime.backends.megatron.shards import (
    STATE,
    is_sharded,
    state_shards,
    weight_shards,
    written_shards,
)
from slime.backends.megatron.trained_model import TrainedModel, layout_sizes, load_weights
from slime.backends.saving import (
    RngState,
    Write,
    new_save_group,
    require_undamaged,
    rng_state,
    set_rng_state,
    small_files_writer,
)
from slime.backends.tensor_shards import ShardMemory, StoredTensors, TensorShard, write_shards
from slime.backends.trainable import TrainedAdapter, require_fit
from slime.checkpoint.files import FileEntry, describe_files
from slime.config.args import Args
from slime.weights.torch_dist import RANK_FILES, TENSORS, describe, mark_as_megatron, read_meta


@dataclass
class MegatronState:
    """The part of the training state on a rank; see :class:`slime.backends.saving.SavedState`.

    With an adapter (LoRA), only it is saved, with the identity of its base.
    """

    args: Args
    rank: int
    world_size: int
    model: TrainedModel
    optimizer: ScheduledOptimizer
    bank: WeightBank
    adapter: TrainedAdapter | None = None

    def __post_init__(self) -> None:
        self.group = new_save_group(self.args.async_save)
        self.memory = ShardMemory()

    def take_memory(self) -> None:
        # whose files are whole storages
        if not self.memory.is_taken and self.args.ckpt_format != "torch":
            self.memory.take(
                shard for shards in self._by_folder(Path()).values() for shard in shards
            )

    def writer(self, path: Path) -> Write:
        if self.rank == 0:
            for name in (self.args.ckpt_format, *map(_copy_folder, self.bank.moving)):
                (path / name).mkdir(parents=True, exist_ok=True)
        if self.world_size > 1:
            dist.barrier()
        write = (
            self._rank_files_writer(path)
            if self.args.ckpt_format == "torch"
            else self._shards_writer(path)
        )
        rng: RngState = {**rng_state(), "tracker": get_cuda_rng_tracker().get_states()}
        description = self._describe()
        small = small_files_writer(path, self.rank, rng, description if self.rank == 0 else None)
        # The collective operations come first: a rank that fails before them would leave the others
        # waiting.
        return lambda: [*write(), *small()]

    def load(self, path: Path) -> None:
        """Load what :meth:`writer` wrote with any layout. Each rank reads its own part.

        With ``--no-load-optim``, optimizer and schedule are not loaded; with ``--no-load-rng``, the
        random state is not; with ``--finetune``, neither of them and none of the copies that a run
        made of its weights.

        Raises:
            FileNotFoundError: There is no such state.
            MegatronError: The state belongs to the other role, or this layout cannot load it. The
                message says what to do.
            SnapshotError: A file has changed since it was written.
        """
        # A snapshot of the other role, of another adapter or with a damaged file is refused before
        # anything is changed.
        meta = read_meta(path)
        if meta["role"] != self.model.role:
            raise MegatronError(
                f"{path} contains the state of the {meta['role']}, not of the {self.model.role}"
            )
        require_fit(self.adapter, path, meta.get("lora"))
        require_undamaged(path, self.rank, self.world_size)
        args = self.args
        adapter = self.adapter is not None
        for tag in [] if args.finetune else meta["copies"]:
            self.bank.moving.add(tag)
            # A copy has no modules. It is loaded into the parameters of the model, which get the
            # actor's weights back afterwards.
            with self.bank.filling(tag):
                load_weights(self.model, path, _copy_folder(tag), adapter)
        # Weights alone; files of single ranks; or weights together with the optimizer's state, in
        # any layout.
        starts_again = args.no_load_optim or args.finetune
        if starts_again or not meta["optimizer"]:
            load_weights(self.model, path, adapter=adapter)
            # Main parameters are copies in float32. Without this, the first step would restore the
            # old weights.
            self.optimizer.chained.reload_model_params()
            if not starts_again:  # of --no-save-optim: the schedule goes on without the moments
                self.optimizer.set_steps(meta["steps"])
        elif meta["ckpt_format"] == "torch":
            load_weights(self.model, path)
            written_by = {**meta["layout"], "distributed optimizer": meta["distributed_optimizer"]}
            here = {
                **layout_sizes(self.model.layout),
                "distributed optimizer": is_sharded(self.optimizer.chained),
            }
            rank_files.read_optimizer(
                self.optimizer, self.rank, path / RANK_FILES, written_by, here
            )
            self.optimizer.set_steps(meta["steps"])
        else:
            self._load_with_optimizer(path, meta["steps"], meta.get("adam_steps", meta["steps"]))
        rng = path / f"rng_{self.rank}.pt"
        if rng.is_file() and not args.no_load_rng and not args.finetune:
            states: RngState = torch.load(rng, weights_only=True)
            set_rng_state(states)
            get_cuda_rng_tracker().set_states(states["tracker"])

    def _by_folder(self, path: Path) -> dict[Path, list[TensorShard]]:
        """Return the shards that this rank writes, by folder."""
        chunks = self.model.chunks
        chained = self.optimizer.chained
        adapter = self.adapter is not None
        with_optimizer = not self.args.no_save_optim
        written = written_shards(chunks, chained, with_optimizer=with_optimizer, adapter=adapter)
        folders = {path / TENSORS: written}
        live = [tensor for _, tensor in self.bank.named]
        for tag in sorted(self.bank.moving):
            of_copy = {
                id(tensor): copy for tensor, copy in zip(live, self.bank.copies[tag], strict=True)
            }
            folders[path / _copy_folder(tag)] = written_shards(
                chunks, chained, of_copy, adapter=adapter
            )
        return folders

    def _shards_writer(self, path: Path) -> Write:
        folders = self._by_folder(path)
        group = None
        if self.args.async_save:
            # Training continues while these are written, so they are copies, and the collectives of
            # the writer use a separate group. In the default group they would be mixed with those
            # of the next step.
            copied = iter(
                self.memory.copied(shard for shards in folders.values() for shard in shards)
            )
            folders = {
                folder: list(islice(copied, len(shards))) for folder, shards in folders.items()
            }
            group = self.group

        def write() -> list[FileEntry]:
            entries = []
            for folder, shards in folders.items():
                entries += write_shards(shards, folder, path, group)
            for folder in folders if self.rank == 0 else ():
                entries += describe_files(mark_as_megatron(folder), path)
            return entries

        return write

    def _rank_files_writer(self, path: Path) -> Write:
        """Return a writer for ``--ckpt-format torch``. The tensors are copied here, before it is
        called.
        """
        files = rank_files.content(_own_states(self.model.chunks), path / RANK_FILES)
        if not self.args.no_save_optim:
            files |= rank_files.optimizer_content(self.optimizer, self.rank, path / RANK_FILES)
        for tag in sorted(self.bank.moving):
            with self.bank.using(tag):
                files |= rank_files.content(
                    _own_states(self.model.chunks), path / _copy_folder(tag)
                )
        return partial(rank_files.write, files, path)

    def _load_with_optimizer(self, path: Path, steps: int, adam_steps: int) -> None:
        stored = StoredTensors(path / TENSORS)
        needed = f"{STATE}exp_avg."
        if (
            steps
            and self.args.optimizer == "adam"
            and not any(name.startswith(needed) for name in stored.shapes)
        ):
            raise MegatronError(
                f"{path} has no moments of Adam under names that this version reads "
                f"({needed}...): pass --no-load-optim to continue with the weights only"
            )
        try:
            chunks = self.model.chunks
            adapter = self.adapter is not None
            of_optimizer = state_shards(chunks, self.optimizer.chained, stored, adapter)
            stored.read([*weight_shards(chunks, adapter), *of_optimizer])
        except ValueError as error:
            raise MegatronError(
                f"{error}; pass --no-load-optim to continue with the weights only"
            ) from error
        self.optimizer.set_adam_steps(adam_steps)
        self.optimizer.set_steps(steps)

    def _describe(self) -> dict[str, object]:
        return describe(
            self.model.family,
            self.model.settings,
            self.args.hf_checkpoint,
            role=self.model.role,
            steps=self.optimizer.steps,
            copies=sorted(self.bank.moving),
            optimizer=not self.args.no_save_optim,
            distributed_optimizer=is_sharded(self.optimizer.chained),
            adam_steps=self.optimizer.adam_steps(),
            layout=layout_sizes(self.model.layout),
            ckpt_format=self.args.ckpt_format,
            train_dtype=self.args.train_dtype,
            **({} if self.adapter is None else {"lora": self.adapter.describe()}),
        )


def _copy_folder(tag: str) -> str:
    return f"copy_{tag}"


def _own_states(chunks: Sequence[Chunk]) -> list[dict[str, Any]]:
    """Return the state dicts of this rank's parts of the model."""
    states = [unwrapped(chunk).state_dict() for chunk in chunks]
    return [
        {name: x for name, x in state.items() if not name.endswith("_extra_state")}
        for state in states
    ]
