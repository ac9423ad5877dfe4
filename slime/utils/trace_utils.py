"""Former import path of traces; the code is in :mod:`slime.observability.trace_utils`."""

from slime.observability.trace_utils import trace_event, trace_function, trace_span

__all__ = ["trace_event", "trace_function", "trace_span"]
