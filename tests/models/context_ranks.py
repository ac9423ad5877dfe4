"""What the ranks of ``test_families_context.py`` run: every family, divided among the ranks of
context parallelism.
"""

from __future__ import annotations

import os
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from family_checks import CPU, assert_same_gradients, gradients, loss_of, one_at_a_time, samples
from torch import nn
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel

from slime.models.inputs import InputBuilder
from slime.models.layer_kinds import layers_of
from slime.models.loading import backbone_of, load_hf_model
from slime.models.packed_attention import NAME
from slime.models.packed_layers import prepare_packing
from slime.models.scorer import PolicyScorer

COUNTS = (10, 1)
"""Samples of a pack. Of two ranks, one gets no sequence of the second."""

Wanted = tuple[torch.Tensor, dict[str, torch.Tensor]]
ONE_GROUP = ("MambaLayer", "BambaMixer", "FalconH1Mixer")
"""Those of Mamba-2 whose norm looks at all channels."""


def worker(rank: int, port: int, folders: dict[str, Path], output: Path) -> None:
    """Write by family what went wrong; "" if nothing did."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group(
        "gloo", init_method=address, rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    found = {}
    for number, (family, folder) in enumerate(folders.items()):
        try:
            # Both ranks have the sums, so one of them compares; they take turns.
            mine = [count for i, count in enumerate(COUNTS) if (number + i) % 2 == rank]
            wanted = {count: one_at_a_time(folder, count) for count in mine}
            for by_heads in (False, True):
                check(folder, dist.group.WORLD, by_heads, wanted)
            found[family] = ""
        except Exception:
            found[family] = traceback.format_exc()
    torch.save(found, output / f"rank{rank}.pt")
    dist.destroy_process_group()


def check(folder: Path, group: ProcessGroup, by_heads: bool, wanted: dict[int, Wanted]) -> None:
    """Log-probs and summed gradients of a pack are those of each sample alone on one rank.

    Args:
        wanted: Those of each sample alone, by the number of samples, for the packs that this rank
            compares.
    """
    model = load_hf_model(folder, torch.float32, "cpu", NAME)
    scorer = PolicyScorer(model)
    builder = InputBuilder(
        backbone_of(model),
        CPU,
        context_group=group,
        by_heads=by_heads,
        stateful=prepare_packing(model),
    )
    rows: list[int] = []
    _watch_projections(model, rows, by_heads)
    for count in COUNTS:
        tokens, responses, groups = (part[:count] for part in samples())
        inputs = builder.build(tokens, responses, groups, [None] * count)
        assert inputs.response_index is not None
        rows.append(len(inputs.kwargs["input_ids"][0]))
        firsts = torch.tensor([0, *responses]).cumsum(0)[:-1].tolist()
        places = torch.cat(
            [first + index for first, index in zip(firsts, inputs.response_index, strict=True)]
        )
        own = scorer(inputs)[0].log_probs
        # 0 for the tokens of the other rank
        log_probs = torch.zeros(sum(responses)).index_copy(0, places, own)
        loss_of(log_probs, 0).backward()
        got = gradients(scorer)
        total = log_probs.detach()
        for tensor in (total, *got.values()):
            dist.all_reduce(tensor, group=group)
        if count in wanted:
            alone, alone_gradients = wanted[count]
            assert float((total - alone).abs().max()) < 1e-5
            assert_same_gradients(got, alone_gradients)


def _watch_projections(model: PreTrainedModel, rows: list[int], by_heads: bool) -> None:
    """Fail where an indexer, or by heads a module with a state that can be divided, projects other
    rows than this rank's, the last of ``rows``.
    """

    def watch(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        assert inputs[0].shape[:-1].numel() == rows[-1], inputs[0].shape

    def watch_block(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        assert inputs[0].shape[:-1].numel() <= rows[-1], inputs[0].shape

    layers = layers_of(model, "")
    for indexer in layers.indexers():
        for part in indexer.children():
            part.register_forward_pre_hook(watch_block)
    for _, _, mixer in layers.mixers() if by_heads else ():
        divided = not type(mixer).__name__.endswith(ONE_GROUP)
        for name, part in mixer.named_children() if divided else ():
            if name.startswith("in_proj"):
                part.register_forward_pre_hook(watch)
