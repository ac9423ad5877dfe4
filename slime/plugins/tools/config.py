"""``--certificate``, in a file that needs nothing heavy, since each ``--help`` reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slime.config.args import Args


@dataclass
class CertificateFlags:
    _title = "certificate"

    certificate: bool = False
    """Write certificate.jsonl at the end of the run: digests of settings, packages, data, and of each
    step's samples, ledger rows, metrics and weights, chained by hash (docs/en/certificate.md)"""


def check(own: Args) -> list[str]:
    """Check that a run with ``--certificate`` records its samples."""
    if not own.certificate or own.save_debug_rollout_data:
        return []
    return ["--certificate needs the samples of each step: add --save-debug-rollout-data"]
