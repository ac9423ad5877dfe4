"""The parallel layout that flags of Megatron describe, for the 36 layers of the checkpoint."""

from __future__ import annotations

import pytest
from config_parts import Workplace

from slime.config.layout import ParallelLayout

BACKEND = "--train-backend megatron --actor-num-gpus-per-node 4 --pipeline-model-parallel-size"


@pytest.mark.parametrize(
    ("flags", "chunks"),
    [
        ("4 --num-layers-per-virtual-pipeline-stage 3", 3),
        ("4 --num-layers-per-virtual-pipeline-stage 3 --num-layers 36", 3),
        ("2 --num-layers-per-virtual-pipeline-stage 18", 1),
        ("4 --num-virtual-stages-per-pipeline-rank 9", 9),
        ("2 --pipeline-model-parallel-layout Et*18|t*18L", 1),
        ("4 --pipeline-model-parallel-layout Et|(ttttt|)*6,ttttt,L", 2),
        (
            "2 --num-layers-per-virtual-pipeline-stage 19 "
            "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
            1,
        ),
    ],
)
def test_interleaved_pipelines(flags: str, chunks: int, workplace: Workplace) -> None:
    """Also without --num-layers, which config.json has."""
    args = workplace.load_unchecked(f"{BACKEND} {flags}".split())
    assert ParallelLayout.from_args(args).vpp == chunks


def test_layers_that_chunks_do_not_divide_are_reported(workplace: Workplace) -> None:
    flags = f"{BACKEND} 4 --num-layers-per-virtual-pipeline-stage"
    assert not [x for x in workplace.problems(f"{flags} 3") if "virtual" in x]
    problems = " ".join(workplace.problems(f"{flags} 4"))
    assert (
        "--num-layers-per-virtual-pipeline-stage 4 x --pipeline-model-parallel-size 4" in problems
    )
