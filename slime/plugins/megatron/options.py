"""Megatron's options: those of Megatron-LM, and the config fields of megatron-core."""

from __future__ import annotations

from pathlib import Path

from slime.config.passthrough import ProgramOptions

OPTIONS = ProgramOptions((Path(__file__).with_name("options.json"),), has_prefix=False)
