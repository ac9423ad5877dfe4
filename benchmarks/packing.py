"""How long ranks in lock step take for a rollout, over the ideal: ``python
benchmarks/packing.py``.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Callable

from slime.config.layout import ParallelLayout
from slime.data.balance import forward_flops
from slime.data.schedule import PackingSettings, build_dp_schedule

# samples, data-parallel ranks, mean of the lengths before they are cut, token budget, tokens of a
# shared prompt
SHAPES = (
    (256, 8, 4000, 16384, 0),
    (512, 64, 4000, 16384, 0),
    (1024, 64, 8000, 32768, 0),
    (2048, 128, 6000, 32768, 0),
    (2048, 128, 6000, 32768, 500),
)
GROUP_SIZE = 8


def measure(
    shape: tuple[int, int, int, int, int], balance: bool, draw: random.Random
) -> tuple[float, float, float, float]:
    """Tokens over the ideal, FLOPs over the ideal, micro-batches per rank, CPU seconds."""
    count, ranks, mean, cap, prompt = shape
    lengths = [
        prompt + min(cap - prompt, max(64, int(draw.lognormvariate(math.log(mean), 0.6))))
        for _ in range(count)
    ]
    settings = PackingSettings(dynamic=True, max_tokens=cap, balanced=balance)
    start = time.process_time()
    partitions, micro_batches, counts, _ = build_dp_schedule(
        settings,
        ParallelLayout(ranks),
        lengths,
        global_batch_size=count,
        rollout_indices=range(count),
        prompts=[(i // GROUP_SIZE, prompt) for i in range(count)] if prompt else None,
    )
    seconds = time.process_time() - start
    ratios = []
    for cost_of in (float, lambda n: forward_flops(settings.shape, n)):
        rows = [
            [_cost([part[i] for i in batch], lengths, prompt, cost_of) for batch in mine]
            for part, mine in zip(partitions, micro_batches, strict=True)
        ]
        ratios.append(sum(map(max, zip(*rows, strict=True))) * ranks / sum(map(sum, rows)))
    return ratios[0], ratios[1], float(counts[0]), seconds


def _cost(
    members: list[int], lengths: list[int], prompt: int, cost_of: Callable[[int], float]
) -> float:
    repeated = len(members) - len({i // GROUP_SIZE for i in members}) if prompt else 0
    return float(sum(cost_of(lengths[i]) for i in members) - repeated * cost_of(prompt))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=10)
    options = parser.parse_args()
    for balance in (False, True):
        draw = random.Random(0)
        for shape in SHAPES:
            runs = [measure(shape, balance, draw) for _ in range(options.draws)]
            tokens, flops, count, seconds = (
                sum(column) / len(runs) for column in zip(*runs, strict=True)
            )
            print(
                f"{shape}: balance_data {balance}: tokens {tokens:.3f}, FLOPs {flops:.3f} times "
                f"the ideal; {count:.1f} micro-batches per rank, {seconds:.2f} s of CPU time"
            )


if __name__ == "__main__":
    main()
