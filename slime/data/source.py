"""Data sources: prompts from the data set, epoch by epoch, and a buffer of groups that were
returned.

The state of a source is a small value (:meth:`RolloutDataSource.state_dict`). A restored source
continues with exactly the groups that the original would have returned: the order of an epoch
depends only on the seed and the epoch, and groups that wait in the buffer are part of the state.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol, Self, TypeAlias, TypeGuard

from slime.config.args import Args
from slime.config.data import DEFAULT_DATA_SOURCE
from slime.config.hooks import load_function
from slime.config.rollout import OWN_FUNCTIONS, SFT_FUNCTION
from slime.data.dataset import Dataset, PromptDataset, PromptMaker
from slime.data.plain_values import load_plain, state_file, write_state
from slime.data.prompts import RowKeys
from slime.data.rows import DataError
from slime.data.sample import Group, Sample, flatten, groups_from_dicts, groups_to_dicts, own_copy
from slime.data.tokenizers import load_processor, load_tokenizer

logger = logging.getLogger(__name__)
BUILT_IN_SOURCES = (DEFAULT_DATA_SOURCE.rpartition(".")[0], __name__)
SourceState: TypeAlias = dict[str, Any]
"""The state of a data source: plain values by name. Users' subclasses may add entries."""


class DataSource(Protocol):
    """The methods that the class of ``--data-source-path`` must have.

    A snapshot holds its state if it also has the methods of :class:`StatefulDataSource` or of
    :class:`FileDataSource`.
    """

    def __len__(self) -> int: ...

    def get_samples(self, num_samples: int) -> list[Group]: ...

    def add_samples(self, samples: list[Group]) -> None: ...


class StatefulDataSource(Protocol):
    """A source whose state is a value, so that a snapshot may hold rollouts that were generated
    ahead of training.
    """

    def state_dict(self) -> SourceState: ...

    def load_state_dict(self, state: SourceState) -> None: ...


class FileDataSource(Protocol):
    """A source that writes its state to files of its own, after each rollout after which a snapshot
    is written.
    """

    def save(self, rollout_id: int) -> None: ...

    def load(self, rollout_id: int | None = None) -> None: ...


def is_stateful(source: object) -> TypeGuard[StatefulDataSource]:
    """Whether the source has the methods of a state. ``isinstance`` does not see those that a
    wrapper passes on.
    """
    return all(callable(getattr(source, name, None)) for name in ("state_dict", "load_state_dict"))


def has_files(source: object) -> TypeGuard[FileDataSource]:
    return all(callable(getattr(source, name, None)) for name in ("save", "load"))


class RolloutDataSource:
    """Returns groups of ``--n-samples-per-prompt`` copies of each prompt.

    With ``--disable-rollout-global-dataset``, there is no data set. Then groups consist of empty
    samples with their indices, for generate functions that create their own prompts.

    Args:
        args: The arguments of the run.
        dataset: Used instead of the data set that ``args`` describe.
    """

    epoch_id: int = 0
    sample_offset: int = 0  # number of prompts of this epoch that were returned
    sample_group_index: int = 0  # index of the next group
    sample_index: int = 0  # index of the next sample
    dataset: PromptDataset | None = None
    metadata: dict[str, Any]  # for subclasses and hooks; part of the state
    # What makes prompts of the rows of the data set, here and in the check before the start.
    maker: Callable[[Args], PromptMaker] = staticmethod(lambda args: prompt_maker(args))

    def __new__(cls, *args: object, **options: object) -> Self:
        """Set what the methods below rely on, since users' subclasses may not call
        ``super().__init__()``.
        """
        source = super().__new__(cls)
        source.metadata = {}
        return source

    def __init__(self, args: Args, dataset: PromptDataset | None = None) -> None:
        self.args = args
        self.dataset = dataset
        if dataset is None and args.rollout_global_dataset:
            self.dataset = load_dataset(args, self.maker)
        self._order_epoch()

    def __len__(self) -> int:
        """Number of prompts in an epoch; 0 without a data set."""
        return 0 if self.dataset is None else len(self.dataset)

    def __bool__(self) -> bool:
        return True  # Otherwise a source without a data set, whose length is 0, would be false.

    def get_samples(self, num_samples: int) -> list[Group]:
        """The next ``num_samples`` groups, from further epochs if the current one has too few."""
        return [self._next_group() for _ in range(num_samples)]

    def add_samples(self, samples: list[Group]) -> None:
        """Take groups back. This class drops them; :class:`RolloutDataSourceWithBuffer` keeps
        them.
        """

    def open_groups(self) -> list[Group]:
        """Groups that were returned and are neither trained nor dropped, as far as the source knows
        them.
        """
        return []

    def get_metadata(self) -> dict[str, Any]:
        """Return :attr:`metadata`, which hooks may read and change."""
        return self.metadata

    def update_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Add entries to :attr:`metadata`."""
        self.metadata.update(metadata)

    def _next_group(self) -> Group:
        group = self._copies(self._next_prompt(), self.sample_group_index)
        self.sample_group_index += 1
        return group

    def _copies(self, prompt: Sample, number: int | None) -> Group:
        """The samples of a prompt, with new indices, as the group ``number``."""
        group: Group = []
        for _ in range(self.args.n_samples_per_prompt):
            sample = deep_copy(prompt)
            sample.group_index = number
            sample.index = self.sample_index
            self.sample_index += 1
            group.append(sample)
        return group

    def _next_prompt(self) -> Sample:
        if self.dataset is None:
            return Sample()
        # A prompt is None if it turned out to be too long. Whole epochs of such prompts would make
        # this loop endless. The next epoch is read to its end, since its order may be another than
        # that of the epoch in progress.
        for _ in range(2 * len(self.dataset)):
            if self.sample_offset >= len(self.dataset):
                self.epoch_id += 1
                self.sample_offset = 0
                self._order_epoch()
            self.sample_offset += 1
            prompt = self.dataset[self.sample_offset - 1]
            if prompt is not None:
                return prompt
        raise DataError(
            f"all {len(self.dataset)} prompts of the data set are longer than "
            "--rollout-max-prompt-len"
        )

    def _order_epoch(self) -> None:
        if self.dataset is not None and self.args.rollout_shuffle:
            self.dataset.shuffle(self.epoch_id)

    # --- state -------------------------------------------------------------------------------

    def state_dict(self) -> SourceState:
        """Everything that a resumed run needs, as a value that shares nothing with the source."""
        return {
            "sample_offset": self.sample_offset,
            "epoch_id": self.epoch_id,
            "sample_group_index": self.sample_group_index,
            "sample_index": self.sample_index,
            "metadata": copy.deepcopy(self.metadata),
            "dataset": self._size(),
        }

    def _size(self) -> list[int]:
        # The bytes change with nearly every edit that leaves the number of rows as it is.
        return [len(self), getattr(self.dataset, "file_bytes", 0)]

    def load_state_dict(self, state: SourceState) -> None:
        """Continue where the source of ``state`` was."""
        # The data file may have been edited between the two runs; the position in the epoch is then
        # only about right.
        now = self._size()
        then = state.get("dataset", now)
        if then != now:
            logger.warning(
                f"the data file has changed: it had {then[0]} prompts ({then[1]} bytes) when the run "
                f"was saved, and has {now[0]} ({now[1]} bytes) now: the rest of epoch "
                f"{state['epoch_id']} may repeat some and leave out others"
            )
        # The order is not part of the state: it follows from the seed and the epoch.
        self.sample_offset = state["sample_offset"]
        self.epoch_id = state["epoch_id"]
        self.sample_group_index = state["sample_group_index"]
        self.sample_index = state["sample_index"]
        self.metadata = copy.deepcopy(state.get("metadata") or {})
        self._order_epoch()

    def save(self, rollout_id: int) -> None:
        """Write the state atomically to
        ``<--save>/rollout/global_dataset_state_dict_<rollout_id>.pt``.
        """
        if not self.args.save:
            raise ValueError("the data source cannot be saved without --save")
        write_state(state_file(self.args.save, rollout_id), self.state_dict())

    def load(self, rollout_id: int | None = None) -> None:
        """Read what :meth:`save` wrote below ``--load``; without it, or before the first rollout,
        change nothing.
        """
        if not self.args.load or rollout_id is None or rollout_id < 0:
            return
        path = state_file(self.args.load, rollout_id)
        if not path.is_file():
            logger.warning(f"{path} does not exist: the prompts start from the beginning")
            return
        self.load_state_dict(load_plain(path))


class RolloutDataSourceWithBuffer(RolloutDataSource):
    """Returns groups from its buffer first, then from the data set.

    :meth:`buffer_filter` decides which groups leave the buffer: override it, or name a function
    with ``--buffer-filter-path``. By default, the oldest groups leave first. A subclass may also
    assign a function with the signature of the flag's function, ``fn(args, rollout_id, buffer,
    num_samples)``, to ``self.buffer_filter``.
    """

    buffer: list[Group]
    on_dropped: Callable[[list[Group]], None]
    """Called with the groups that the buffer filter drops."""
    under_way: Callable[[], list[Group]]
    """Returns the groups whose generation continues past the end of a rollout, as the source
    returned them. A rollout function with such groups sets this. A resumed run gets these groups
    again, before any others."""

    def __new__(cls, *args: object, **options: object) -> Self:
        source = super().__new__(cls)
        source.buffer = []
        source.under_way = list
        source.on_dropped = lambda groups: None
        return source

    def get_samples(self, num_samples: int) -> list[Group]:
        groups = self._from_buffer(num_samples)
        return groups + super().get_samples(num_samples - len(groups))

    def add_samples(self, samples: list[Group]) -> None:
        """Keep groups (aborted, partial or stale ones) for a later :meth:`get_samples`.

        Raises:
            ValueError: A group does not have ``--n-samples-per-prompt`` members; a list of fan-out
                siblings counts as one member.
        """
        for group in samples:
            if isinstance(group, Sample) or len(group) != self.args.n_samples_per_prompt:
                size = "a bare sample" if isinstance(group, Sample) else f"a group of {len(group)}"
                raise ValueError(
                    f"{size} was returned, but groups have {self.args.n_samples_per_prompt} members"
                )
        self.buffer.extend(samples)

    def get_buffer_length(self) -> int:
        """Number of groups in the buffer."""
        return len(self.buffer)

    def buffer_filter(self, args: Args, buffer: list[Group], num_samples: int) -> list[Group]:
        """Choose at most ``num_samples`` groups of ``buffer``.

        It may remove these and other groups from the buffer. The chosen groups are removed in any
        case.
        """
        if args.buffer_filter_path:
            return load_function(args.buffer_filter_path)(args, None, buffer, num_samples)
        return pop_first(args, None, buffer, num_samples)

    def _from_buffer(self, num_samples: int) -> list[Group]:
        if not self.buffer or num_samples <= 0:
            return []
        # Users' filters may or may not remove the chosen groups from the buffer, so this is made up
        # for here. Samples are compared by identity, because a filter may return new lists of the
        # same samples.
        before = list(self.buffer)

        def without(groups: list[Group], samples: set[int]) -> list[Group]:
            return [g for g in groups if not any(id(sample) in samples for sample in flatten(g))]

        assigned = vars(self).get("buffer_filter")
        if assigned is None:
            chosen = list(self.buffer_filter(self.args, self.buffer, num_samples))
        else:
            chosen = list(assigned(self.args, None, self.buffer, num_samples))
        taken = {id(sample) for sample in flatten(chosen)}
        if len(chosen) > num_samples or len(taken) != len(flatten(chosen)):
            raise ValueError(
                f"the buffer filter returned {len(chosen)} of {num_samples} groups, or one group "
                "twice"
            )
        self.buffer[:] = without(self.buffer, taken)
        kept = taken | {id(sample) for sample in flatten(self.buffer)}
        if dropped := without(before, kept):
            logger.info(f"the buffer filter dropped {len(dropped)} groups")
            self.on_dropped(dropped)
        return chosen

    def open_groups(self) -> list[Group]:
        return [*self.under_way(), *self.buffer]

    def state_dict(self) -> SourceState:
        return {
            **super().state_dict(),
            "buffer": groups_to_dicts(self.open_groups()),
            "n_samples_per_prompt": self.args.n_samples_per_prompt,
        }

    def load_state_dict(self, state: SourceState) -> None:
        super().load_state_dict(state)
        self.buffer = groups_from_dicts(state.get("buffer") or [])
        now = self.args.n_samples_per_prompt
        then = state.get("n_samples_per_prompt", now)
        if then != now and self.buffer:
            logger.warning(
                f"--n-samples-per-prompt: {then} -> {now}: the {len(self.buffer)} groups in the "
                "buffer begin again from their prompts"
            )
            self.buffer = [self._begun_again(group) for group in self.buffer]

    def _begun_again(self, group: Group) -> Group:
        prompt = flatten(group)[0]
        prompt.reset_response()
        prompt.rollout_id = None  # of a fan-out
        # the rollout loop sets it with the first tokens
        prompt.metadata.pop("start_rollout_id", None)
        return self._copies(prompt, prompt.group_index)


def pop_first(
    args: Args, rollout_id: int | None, buffer: list[Group], num_samples: int
) -> list[Group]:
    """The default buffer filter: the oldest groups leave first."""
    chosen = buffer[:num_samples]
    del buffer[:num_samples]
    return chosen


def prompt_maker(args: Args) -> PromptMaker:
    """What makes prompts of the rows of ``--prompt-data``, without a tokenizer.

    Messages that stay messages are rendered by slime's rollout functions, but maybe not by the
    user's own functions.
    """
    sft = args.rollout_function_path == SFT_FUNCTION
    own_rollout = args.rollout_function_path not in OWN_FUNCTIONS
    own_source = args.data_source_path.rpartition(".")[0] not in BUILT_IN_SOURCES
    return PromptMaker(
        RowKeys(
            args.input_key,
            args.label_key,
            args.metadata_key,
            args.tool_key,
            args.multimodal_keys or {},
        ),
        load_processor=functools.partial(
            load_processor, args.hf_checkpoint, args.trust_remote_code
        ),
        max_length=args.rollout_max_prompt_len,
        apply_chat_template=args.apply_chat_template,
        template_kwargs=dict(args.apply_chat_template_kwargs or {}),
        rendered_later=sft or not (own_rollout or own_source or args.custom_generate_function_path),
        mask_type=args.loss_mask_type if sft else None,
        checks=args.streaming_data,
    )


def rollouts_of_epochs(prompts: int, epochs: int | None, batch: int) -> int:
    """Return the number of rollouts of ``batch`` prompts: the fewest that use every prompt
    ``epochs`` times (default: 1), at least 1.

    A rollout that the end of an epoch does not fill takes the rest from the next epoch, so that
    only the last rollout of a run may have prompts of an epoch more.
    """
    return max(-(-prompts * (epochs or 1) // batch), 1)


def load_dataset(args: Args, maker: Callable[[Args], PromptMaker] = prompt_maker) -> Dataset:
    """The data set of ``--prompt-data``; for data sources of users, too.

    Raises:
        DataError: There are problems in the data set; the message lists them.
    """
    assert args.prompt_data, "checked before the start"
    make = maker(args)
    if make.apply_chat_template or make.checks or make.max_length is not None:
        make.tokenizer = load_tokenizer(args.hf_checkpoint, args.trust_remote_code)
    return Dataset(
        args.prompt_data,
        make=make,
        seed=args.rollout_seed,
        streaming=args.streaming_data,
        workers=args.num_data_workers,
    )


def deep_copy(sample: Sample) -> Sample:
    """A copy that shares nothing mutable with ``sample``, several times faster than
    :func:`copy.deepcopy`.

    Its fields are copied one by one: an object that two fields share becomes two objects.
    """
    made = copy.copy(sample)  # copies the counters of the engine
    data = vars(made)
    for name, value in data.items():
        if name not in ("spec_info", "prefix_cache_info"):
            data[name] = own_copy(value)
    return made
