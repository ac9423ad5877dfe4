"""The delta transport as the driver and the servers know it, without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from slime.plugins.delta import LOADER
from slime.weights.transports.base import TransportKind

if TYPE_CHECKING:
    from slime.plugins.delta.config import DeltaConfig
    from slime.plugins.delta.published import Encoding
    from slime.plugins.delta.transport import DeltaTransport
    from slime.weights.settings import WeightSyncSettings


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
