"""What one weight sync of a large model over many engines sends, by the plan of the code and by
measured rates.

    python benchmarks/sync_plan.py                     # 671 billion parameters in bf16, 128 engines of 16 GPUs

Senders and their engines come from the function that a run uses (``ranks_of_engines``), buckets
from its default size. Seconds are estimates: the bytes over the slower of two rates, that of the
sender's network cards (``--nic-gbit``, data sheet, not measured) and that of a whole sync to one
engine over NVLink (7.5 GiB in 0.082 s with buckets of 1 GiB, measured on H200s). Every sender sends
all weights, all of them at the same time; within a broadcast each node passes the bytes on once.
Python's share is the measured CPU time of a sender per call (sync_calls_cpu). Nobody has run a sync
of this size.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

GIB = 2**30
SYNC_GIB_PER_SECOND = 7.5 / 0.082
CPU_SECONDS_PER_CALL = 0.41 / 1072
HEADER = (
    "| engines | senders | most engines of a sender | buckets | calls of a sender | GB sent by a "
    "sender | GB over each of its network cards | seconds, data | seconds, Python |"
)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", type=float, default=671e9)
    parser.add_argument("--engines", default="8,32,128", help="numbers of engines, comma-separated")
    parser.add_argument("--engine-gpus", type=int, default=16)
    parser.add_argument("--ranks", type=int, default=512, help="training ranks, 8 on a node")
    parser.add_argument(
        "--nics", type=int, default=1, help="network cards that a broadcast uses at its sender"
    )
    parser.add_argument(
        "--nic-gbit", type=float, default=400.0, help="rate of one of them in Gbit/s"
    )
    return parser.parse_args()


def table(options: argparse.Namespace) -> list[str]:
    """The rows as Markdown."""
    from slime.config.args import Args
    from slime.weights.settings import WeightSyncSettings
    from slime.weights.transports import ranks_of_engines
    from slime.weights.transports.distributed import DistributedTransport

    settings = replace(WeightSyncSettings.from_args(Args()), colocate=False)
    size = DistributedTransport("nccl", 1.0).bucket_bytes
    total = 2 * options.parameters
    rate = min(options.nics * options.nic_gbit / 8 * 1e9, SYNC_GIB_PER_SECOND * GIB)
    lines = [HEADER, "|" + "---|" * (HEADER.count("|") - 1)]
    for count in map(int, options.engines.split(",")):
        urls = [f"http://engine-{i}:80" for i in range(count)]
        slots = {
            url: range(i * options.engine_gpus, (i + 1) * options.engine_gpus)
            for i, url in enumerate(urls)
        }
        ranks = ranks_of_engines(settings, urls, slots, options.ranks, same_host=False)
        of_sender = Counter(found.start for found in ranks.values())
        most, buckets = max(of_sender.values()), -int(-total // size)
        calls = buckets * most
        lines.append(
            f"| {count} | {len(of_sender)} | {most} | {buckets:,} | {calls:,} | "
            f"{total / 1e9:,.0f} | {total / 1e9 / options.nics:,.0f} | {total / rate:.0f} | "
            f"{calls * CPU_SECONDS_PER_CALL:.1f} |"
        )
    return lines


def main() -> None:
    print("\n".join(table(parse_options())))


if __name__ == "__main__":
    main()
