"""Traces of samples: spans that show how the time of each sample was spent.

A sample has its trace as an attribute: ``sample.trace = {version, trace_id, events, sample_id,
group_id, attempt}``. An event is a plain dict, so traces survive pickling, the buffer and a
resume::

    {"type": "span_start" | "span_end" | "event", "name", "ts", "span_id", "parent_id", "attempt", "attrs"}

``ts`` is the wall time in seconds (``time.time()``), so spans of several processes share one time
axis. Samples of a group may share an event object, so events must not be modified.

No function in this module raises an error into the traced code. An error is logged once per place
and ignored.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar, Token
from typing import Any, NotRequired, ParamSpec, TypedDict, TypeVar

logger = logging.getLogger(__name__)

TRACE_VERSION = 1
P = ParamSpec("P")
R = TypeVar("R")
Attrs = dict[str, object]
Getter = Callable[..., Any]


class Event(TypedDict):
    """One event of a trace. ``type`` is span_start, span_end or event; ``ts`` is the wall time in
    seconds.
    """

    type: str
    name: str
    ts: float
    span_id: str
    parent_id: str | None
    attempt: int
    attrs: NotRequired[Attrs]


class Trace(TypedDict):
    """The attribute ``trace`` of a sample."""

    version: int
    trace_id: str
    events: list[Event]
    sample_id: int | None
    group_id: int | None
    attempt: int


_counter = itertools.count(1)
_reported: set[str] = set()
_bound: ContextVar[tuple[object, ...]] = ContextVar("slime_trace_targets", default=())
_parent: ContextVar[str | None] = ContextVar("slime_trace_parent", default=None)

_META_FIELDS = (
    "id", "prompt_tokens", "completion_tokens", "cached_tokens", "weight_version", "e2e_latency", "queue_time",
    "spec_accept_token_num", "spec_draft_token_num", "spec_verify_ct",
)  # fmt: skip


class Span:
    """A context manager that measures a block for one or more samples.

    :meth:`set` adds attributes that are known only at the end. Thousands of spans are open at once
    in an asynchronous run, so this is a class with slots, which is cheaper than a generator.
    """

    __slots__ = (
        "_given",
        "_parent_id",
        "_target",
        "_targets",
        "_tokens",
        "attrs",
        "name",
        "span_id",
    )

    def __init__(self, target: object, name: str, attrs: Attrs | None = None) -> None:
        self.name = name
        self.span_id = _span_id()
        self.attrs: Attrs = {}
        self._target = target
        self._given = attrs

    def set(self, **attrs: object) -> None:
        self.attrs.update(attrs)

    def update(self, attrs: Mapping[str, object] | None = None, **more: object) -> None:
        """Add attributes, from a mapping or by keyword."""
        self.attrs.update(attrs or {}, **more)

    def __enter__(self) -> Span:
        self._targets = _targets(self._target)
        self._parent_id = _parent.get()
        _record(self._targets, "span_start", self.name, self.span_id, self._parent_id, self._given)
        self._tokens = (_bound.set(self._targets), _parent.set(self.span_id))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: object) -> None:
        if kind is not None:
            self.set(error=kind.__name__)
        _reset(self._tokens)
        _record(self._targets, "span_end", self.name, self.span_id, self._parent_id, self.attrs)


def trace_on(target: object) -> Trace | None:
    """Return the trace of ``target``; None if it has none."""
    trace: Trace | None = getattr(target, "trace", None)
    return trace if isinstance(trace, dict) else None


def bind_trace(target: object) -> Trace | None:
    """Return the trace of a sample, which is created if necessary; None if the object cannot have
    attributes.
    """
    try:
        trace = trace_on(target)
        if trace is None:
            trace = {
                "version": TRACE_VERSION,
                "trace_id": uuid.uuid4().hex,
                "events": [],
                "sample_id": getattr(target, "index", None),
                "group_id": getattr(target, "group_index", None),
                "attempt": 0,
            }
            setattr(target, "trace", trace)  # noqa: B010  # any object that accepts attributes can be traced
        return trace
    except Exception as error:
        _drop("bind_trace", error)
        return None


def trace_span(target: object, name: str, attrs: Attrs | None = None) -> Span:
    """Measure a block for a sample, for each sample of a (nested) list, or with None for those of
    the enclosing span.

    >>> with trace_span(sample, "sglang_generate", {"turn": 0}) as span:
    ...     span.set(tokens=20)

    An exception in the block is recorded as ``attrs["error"]`` and raised again.
    """
    return Span(target, name, attrs)


def trace_event(target: object, name: str, attrs: Attrs | None = None) -> None:
    """Record an event without a duration, for the same targets as in :func:`trace_span`."""
    _record(_targets(target), "event", name, _span_id(), _parent.get(), attrs)


def trace_function(
    name: str,
    *,
    target: str | None = None,
    target_getter: Getter | None = None,
    attrs_getter: Getter | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that runs a sync or async function in a span.

    Args:
        name: Name of the span.
        target: Name of the function's parameter that is the sample or the list of samples.
        target_getter: Function that returns the target from the function's arguments; used instead
            of ``target``.
        attrs_getter: Function that returns the span's attributes from the function's arguments.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        # Once for each function, since it takes longer than a span.
        signature = inspect.signature(function)

        def opened(args: tuple[object, ...], kwargs: dict[str, object]) -> Span:
            found = None
            attrs = None
            try:
                if target_getter is not None:
                    found = target_getter(*args, **kwargs)
                elif target is not None:
                    found = signature.bind(*args, **kwargs).arguments.get(target)
                attrs = attrs_getter(*args, **kwargs) if attrs_getter is not None else None
            except Exception as error:
                _drop(f"trace_function({name!r})", error)
            return trace_span(found, name, attrs)

        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def traced_async(*args: P.args, **kwargs: P.kwargs) -> Any:
                with opened(args, kwargs):
                    return await function(*args, **kwargs)

            return traced_async  # type: ignore[return-value]

        @functools.wraps(function)
        def traced(*args: P.args, **kwargs: P.kwargs) -> R:
            with opened(args, kwargs):
                return function(*args, **kwargs)

        return traced

    return decorate


def export_trace(sample: object) -> Trace | None:
    """Return a copy of the sample's trace, which can be pickled or written as JSON; None if it has
    none.
    """
    return copy.deepcopy(trace_on(sample))


def import_trace(sample: object, trace: Trace | None) -> None:
    """Set the trace of a sample to a result of :func:`export_trace`. None and traces of other
    versions are ignored.
    """
    try:
        if trace is None:
            return
        if trace.get("version") != TRACE_VERSION or not isinstance(trace.get("events"), list):
            raise ValueError(f"not a trace of version {TRACE_VERSION}: {str(trace)[:80]}")
        setattr(sample, "trace", copy.deepcopy(trace))  # noqa: B010
    except Exception as error:
        _drop("import_trace", error)


def build_sglang_meta_trace_attrs(meta_info: Mapping[str, object]) -> Attrs:
    """Return the entries of an engine's ``meta_info`` for a span: token counts, latencies, finish
    reason.
    """
    try:
        attrs = {key: meta_info[key] for key in _META_FIELDS if meta_info.get(key) is not None}
        reason = meta_info.get("finish_reason")
        if reason:
            attrs["finish_reason"] = reason["type"] if isinstance(reason, dict) else str(reason)
        return attrs
    except Exception as error:
        _drop("build_sglang_meta_trace_attrs", error)
        return {}


def _targets(target: object) -> tuple[object, ...]:
    # Without a target, the span belongs to the samples of the span around it.
    if target is None:
        return _bound.get()
    if isinstance(target, list | tuple):
        return tuple(leaf for item in target for leaf in _targets(item))
    return (target,)


def _record(
    targets: Iterable[object],
    kind: str,
    name: str,
    span_id: str,
    parent: str | None,
    attrs: Attrs | None,
) -> None:
    try:
        # One time for all samples of the event, so that the viewer shows it as one moment.
        now = time.time()
        event: Event | None = None
        for sample in targets:
            trace = bind_trace(sample)
            if trace is None:
                continue
            attempt = trace.get("attempt", 0)
            # A group has up to hundreds of samples; one event for all of them saves most of the
            # memory of traces.
            # otherwise the samples of a group share one event
            if event is None or event["attempt"] != attempt:
                event = {
                    "type": kind, "name": name, "ts": now, "span_id": span_id, "parent_id": parent, "attempt": attempt,
                }  # fmt: skip
                if attrs:
                    event["attrs"] = dict(attrs)
            trace["events"].append(event)
    except Exception as error:
        _drop(f"{kind} {name!r}", error)


def _reset(tokens: tuple[Token[tuple[object, ...]], Token[str | None]]) -> None:
    try:
        _bound.reset(tokens[0])
        _parent.reset(tokens[1])
    # raised if a generator is closed in another context than that of its start
    except ValueError as error:
        _drop("trace_span", error)


def _span_id() -> str:
    return f"{os.getpid():x}-{next(_counter):x}"


def _drop(where: str, error: BaseException) -> None:
    if where not in _reported:
        _reported.add(where)
        logger.warning(
            f"tracing: {where} failed; later errors are not logged: {type(error).__name__}: {error}"
        )
