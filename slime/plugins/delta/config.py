"""Flags of the delta transport."""

from __future__ import annotations

from dataclasses import dataclass

from slime.config.flag import Section, flag


@dataclass
class DeltaConfig(Section):
    _title = "delta transport"

    update_weight_delta_encoding: str = flag("xor", choices=("xor", "overwrite"))
    """Delta of a changed byte: the XOR of old and new value, or the new value"""
    update_weight_delta_checksum: str = flag("xxh3-128", choices=("xxh3-128", "blake3", "adler32"))
    """Checksum of each tensor with --update-weight-mode delta"""
