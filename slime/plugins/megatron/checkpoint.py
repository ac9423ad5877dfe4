"""Training state in torch's distributed checkpoint format (``torch_dist``), which any parallel
layout can load.

A folder has ``trainer.json`` (layout, shape and flags, which converters need), the tensors of model
and optimizer, one folder per copy of the weights, and the random state of each rank. Names are
those of megatron-core. Layers are numbered as in the whole model, so names do not depend on
pipeline stages and interleaving. Every rank writes its part of every tensor
(:mod:`~slime.plugins.megatron.shards`). With ``--ckpt-format torch``, each rank writes its tensors
to separate files instead (:mod:`~slime.plugins.megatron.rank_files`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron.core.tensor_parallel import get_cuda_rng_tracker

from slime.backends.saving import RngState, SavedState, Write
from slime.backends.tensor_shards import StoredTensors, TensorShard
from slime.checkpoint.files import FileEntry, describe_files
from slime.plugins.megatron import rank_files
from slime.plugins.megatron.core import MegatronError
from slime.plugins.megatron.model import Chunk, unwrapped
from slime.plugins.megatron.optimizer import ScheduledOptimizer
from slime.plugins.megatron.shards import (
    STATE,
    is_sharded,
    state_shards,
    weight_shards,
    written_shards,
)
from slime.plugins.megatron.torch_dist import (
    RANK_FILES,
    TENSORS,
    describe,
    mark_as_megatron,
    read_meta,
)
from slime.plugins.megatron.trained_model import TrainedModel, layout_sizes, load_weights


@dataclass
class MegatronState(SavedState):
    """See :class:`slime.backends.saving.SavedState`."""

    model: TrainedModel
    optimizer: ScheduledOptimizer

    def take_memory(self) -> None:
        if self.args.ckpt_format != "torch":  # whose files are whole storages
            super().take_memory()

    def folders(self, path: Path) -> list[Path]:
        """See :meth:`SavedState.folders`."""
        return [
            path / name for name in (self.args.ckpt_format, *map(_copy_folder, self.bank.moving))
        ]

    def rng(self) -> RngState:
        """See :meth:`SavedState.rng`; with Megatron's own generators."""
        return {**super().rng(), "tracker": get_cuda_rng_tracker().get_states()}

    def load(self, path: Path) -> None:
        """Load what :meth:`writer` wrote with any layout. Each rank reads its own part.

        With ``--no-load-optim``, optimizer and schedule are not loaded; with ``--no-load-rng``, the
        random state is not; with ``--finetune``, neither of them and none of the copies that a run
        made of its weights.

        Raises:
            FileNotFoundError: There is no such state.
            ValueError: The state belongs to the other role or to another adapter.
            MegatronError: This layout cannot load it. The message says what to do.
            SnapshotError: A file has changed since it was written.
        """
        # A snapshot of the other role, of another adapter or with a damaged file is refused before
        # anything is changed.
        meta = read_meta(path)
        self.require_fit(path, meta)
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
        if (states := self.load_rng(path)) is not None:
            get_cuda_rng_tracker().set_states(states["tracker"])

    def written(self, path: Path) -> dict[Path, list[TensorShard]]:
        """See :meth:`SavedState.written`."""
        chunks = self.model.chunks
        chained = self.optimizer.chained
        adapter = self.adapter is not None
        with_optimizer = not self.args.no_save_optim
        live_shards = written_shards(
            chunks, chained, with_optimizer=with_optimizer, adapter=adapter
        )
        folders = {path / TENSORS: live_shards}
        live = [tensor for _, tensor in self.bank.named]
        for tag in sorted(self.bank.moving):
            of_copy = {
                id(tensor): copy for tensor, copy in zip(live, self.bank.copies[tag], strict=True)
            }
            folders[path / _copy_folder(tag)] = written_shards(
                chunks, chained, of_copy, adapter=adapter
            )
        return folders

    def tensors_writer(self, path: Path) -> Write:
        """See :meth:`SavedState.tensors_writer`."""
        if self.args.ckpt_format == "torch":
            return self._rank_files_writer(path)
        write = super().tensors_writer(path)
        folders = self.folders(path) if self.rank == 0 else []

        def write_and_mark() -> list[FileEntry]:
            entries = write()
            for folder in folders:
                entries += describe_files(mark_as_megatron(folder), path)
            return entries

        return write_and_mark

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

    def describe(self) -> dict[str, object]:
        return describe(
            self.model.family,
            self.model.settings,
            self.args.hf_checkpoint,
            role=self.role,
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
