"""Former import path of traces; the code is in :mod:`slime.observability.trace_utils`."""

from slime.observability.trace_utils import (
    build_sglang_meta_trace_attrs,
    trace_event,
    trace_function,
    trace_span,
)

__all__ = ["build_sglang_meta_trace_attrs", "trace_event", "trace_function", "trace_span"]
