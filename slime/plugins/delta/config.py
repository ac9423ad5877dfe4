"""The flags of the delta transport, and its kind, which the driver and the servers read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

from slime.config.flag import Section
from slime.config.weight_sync import TransportKind
from slime.plugins.delta import LOADER

if TYPE_CHECKING:
    from slime.plugins.delta.published import Encoding
    from slime.plugins.delta.transport import DeltaTransport
    from slime.weights.settings import WeightSyncSettings


@dataclass
class DeltaConfig(Section):
    _title = "delta transport"

    update_weight_delta_encoding: Literal["xor", "overwrite"] = "xor"
    """Delta of a changed byte: the XOR of old and new value, or the new value"""
    update_weight_delta_checksum: Literal["xxh3-128", "blake3", "adler32"] = "xxh3-128"
    """Checksum of each tensor with --update-weight-mode delta"""


def _create(settings: WeightSyncSettings, _: bool) -> DeltaTransport:
    from slime.plugins.delta.transport import DeltaTransport
    from slime.weights.transports.disk import claimed_folder

    folder, model = claimed_folder(settings)
    own = cast("DeltaConfig", settings.own)
    return DeltaTransport(
        folder,
        model,
        settings.step_seconds,
        cast("Encoding", own.update_weight_delta_encoding),
        own.update_weight_delta_checksum,
        settings.sync.update_weight_disk_keep_files,
        settings.on_written,
    )


DELTA = TransportKind(_create, through_folder=True, weight_loader=LOADER)
