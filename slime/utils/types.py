"""Documented import path of ``Sample`` and its relatives; the code is in
:mod:`slime.data.sample`.
"""

from slime.data.media import MultimodalType, MultimodalTypes
from slime.data.sample import ParamInfo, PrefixCacheInfo, RolloutBatch, Sample, SpecInfo, Status

__all__ = [
    "MultimodalType",
    "MultimodalTypes",
    "ParamInfo",
    "PrefixCacheInfo",
    "RolloutBatch",
    "Sample",
    "SpecInfo",
    "Status",
]
