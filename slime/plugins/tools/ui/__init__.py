"""``slime ui``: a local page that shows runs from the files that they leave, also while they go
on.

Here is what the page shows, by the path of a request; the page itself, its files and its HTML; and
``slime ui --export run.html``, the page as one file with as much of the runs as it may hold.

A part of a path is a key of a run, a number, or a name that is looked up in what is known; none of
them becomes part of a path of the file system without being compared with what exists.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TypeVar
from urllib.parse import quote, unquote

import orjson

from . import views
from .runs import Run, Runs


class NotFound(LookupError):
    """There is nothing under this path."""


def answer(runs: Runs, path: str) -> views.View:
    """Return the value for JSON under a path such as ``/api/run/NAME/step/3``, whose parts are
    percent-encoded.

    Raises:
        NotFound: There is no such run, step, sample, metric or page.
    """
    parts = [unquote(part) for part in path.strip("/").split("/")]
    # The addresses of the page's own requests, each with its view.
    match parts:
        case ["api", "runs"]:
            return {"runs": [views.summary(run) for run in runs.all()]}
        case ["api", "run", key, name, *rest]:
            run = runs.get(key)
            if run is None:
                raise NotFound(f"there is no run {key!r}")
            view = _of_run(run, name, rest)
            if view is not None:
                return view
    raise NotFound(f"there is nothing under {path}")


def as_json(value: object) -> bytes:
    """Return a value as JSON in UTF-8. NaN becomes null, and a lone surrogate of a text becomes a
    question mark.
    """
    try:
        return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS, default=str)
    except TypeError:  # a lone surrogate, or an integer of more than 64 bits
        finite = json.loads(json.dumps(value, default=str), parse_constant=lambda name: None)
        return json.dumps(finite, ensure_ascii=False).encode("utf-8", "replace")


_VIEWS: dict[str, tuple[str, Callable[..., views.View | None]]] = {
    "overview": ("", views.overview),
    "doctor": ("", views.doctor),
    "series": ("t", lambda run, name: run.series.curve(name)),
    "steps": ("", views.steps),
    "step": ("n", views.step),
    "timeline": ("n", views.step_timeline),
    "sample": ("tnn", views.sample),
    "tokens": ("nn", lambda run, number, index: run.tokens.sample(number, index)),
    "prompts": ("", views.prompts),
    "prompt": ("t", views.prompt),
    "evaluations": ("", views.evaluations),
    "evaluation": ("tnn", views.comparison),
    "ledger": ("", views.ledger),
    "engines": ("", views.engines),
}
"""What is shown of a run by its name in a path, each with the kinds of the parts after it: a text or
a number.
"""


def _of_run(run: Run, name: str, rest: Sequence[str]) -> views.View | None:
    kinds, view = _VIEWS.get(name, ("", None))
    if view is None or len(rest) != len(kinds):
        return None
    return view(
        run, *(_number(x) if kind == "n" else x for kind, x in zip(kinds, rest, strict=True))
    )


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 15):
        raise NotFound(f"{text!r} is not a number")
    return int(text)


def path_of(*parts: object) -> str:
    """Return the path of which :func:`answer` reads ``parts``."""
    return "/api/" + "/".join(quote(str(part), safe="") for part in parts)


T = TypeVar("T")


@dataclass(frozen=True)
class Limits:
    """What an export may hold.

    Attributes:
        steps: Number of steps of each run with their groups and time lines: the first, the last,
            and others between them at even distances.
        samples: Number of samples of each of these steps with their texts and tokens.
        megabytes: Of JSON before compression, of all runs together. Samples are left out when it is
            reached.
    """

    steps: int = 12
    samples: int = 32
    megabytes: float = 24.0


def export(runs: Runs, limits: Limits) -> str:
    """Return the page as one HTML file. All files of the runs are read first.

    What the file leaves out is said on its pages.
    """
    runs.refresh()
    # What the pages need comes first, then samples until the file is full.
    answers: dict[str, object] = {}
    room = limits.megabytes * 1e6
    left_out = False
    for path, needed in _paths(runs, limits):
        if path in answers:  # a prompt comes in several steps
            continue
        if not needed and room <= 0:
            left_out = True
            continue
        try:
            encoded = as_json(answer(runs, path))
        except NotFound:
            continue
        answers[path] = orjson.loads(encoded)
        room -= len(encoded)
    made = (
        f"Exported on {time.strftime('%Y-%m-%d %H:%M')}. It holds {limits.steps} steps of each "
        f"run at even distances, with up to {limits.samples} samples of each."
    )
    made += (
        f" Some samples were left out, to stay below {limits.megabytes:g} MB." if left_out else ""
    )
    return alone(answers, made)


def _paths(runs: Runs, limits: Limits) -> Iterator[tuple[str, bool]]:
    """Yield the paths to put into the file, and whether it would be useless without them."""
    yield path_of("runs"), True
    for run in runs.all():
        for name in ("overview", "doctor", "steps", "prompts", "evaluations", "ledger", "engines"):
            yield path_of("run", run.key, name), True
        for name in run.series.names:
            yield path_of("run", run.key, "series", name), True
    for run in runs.all():
        rows = run.index.rows(
            "select distinct step from samples where kind = 'rollout' order by step"
        )
        chosen = evenly(
            [row["step"] for row in rows] or range(run.series.last_step + 1), limits.steps
        )
        for number in chosen:
            yield path_of("run", run.key, "step", number), True
        yield from ((path, False) for path in _comparisons(run, limits.samples))
        for number in chosen:
            yield path_of("run", run.key, "timeline", number), False
            yield from ((path, False) for path in _samples(run, int(number or 0), limits.samples))


def _samples(run: Run, number: int, most: int) -> Iterator[str]:
    query = (
        "select position, sample_index, prompt from samples where kind = 'rollout' and step = ? "
        "order by position"
    )
    rows = evenly(run.index.rows(query, (number,)), most)
    for row in rows:
        yield path_of("run", run.key, "sample", "rollout", number, row["position"])
        if row["sample_index"] is not None and run.tokens.recorded(number):
            yield path_of("run", run.key, "tokens", number, row["sample_index"])
    for key in dict.fromkeys(row["prompt"] for row in rows):
        yield path_of("run", run.key, "prompt", key)


def _comparisons(run: Run, most: int) -> Iterator[str]:
    """Yield the first and the last evaluation of each data set side by side, with some of their
    samples.
    """
    texts = views.evaluations(run)["texts"]
    assert isinstance(texts, dict)
    for name, steps in texts.items():
        yield path_of("run", run.key, "evaluation", name, steps[0], steps[-1])
        for number in dict.fromkeys((steps[0], steps[-1])):
            query = "select position from samples where kind = ? and step = ? order by position"
            for row in evenly(run.index.rows(query, (f"eval-{name}", number)), most):
                yield path_of("run", run.key, "sample", f"eval-{name}", number, row["position"])


def evenly(items: Iterable[T], most: int) -> list[T]:
    """Return at most ``most`` items at even distances, with the first and the last.

    >>> evenly(range(10), 4)
    [0, 3, 6, 9]
    """
    every = list(items)
    if len(every) <= most:
        return every
    if most < 2:
        return every[len(every) - most :]
    return [every[round(i * (len(every) - 1) / (most - 1))] for i in range(most)]


_TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html"}
ICON = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E%3Cpath "
    "d='M1 12c3 0 3-8 7-8s3 5 7 5' fill='none' stroke='%232f7d5b' stroke-width='2.5' "
    "stroke-linecap='round'/%3E%3C/svg%3E"
)
_MAIN = 'import "slime/main.js";'
_VENDOR = "uplot.min.js"


@cache
def assets() -> Mapping[str, tuple[str, bytes]]:
    """Return the content type and the content of each file of the page, by its name in an
    address.
    """
    by_name = {}
    static = files("slime.plugins.tools.ui") / "static"
    for folder in (static, static / "vendor"):
        for file in folder.iterdir():
            suffix = "." + file.name.rpartition(".")[2]
            if suffix in _TYPES and file.is_file():
                by_name[file.name] = (_TYPES[suffix], file.read_bytes())
    return by_name


def modules() -> dict[str, str]:
    """Return the page's own JavaScript modules by name."""
    return {
        name: content.decode()
        for name, (_, content) in assets().items()
        if name.endswith(".js") and name != _VENDOR
    }


def served() -> tuple[str, str]:
    """Return the HTML for the server, and its content security policy."""
    imports = {f"slime/{name}": f"/static/{name}" for name in sorted(modules())}
    head = (
        '<link rel="stylesheet" href="/static/uplot.min.css"><link rel="stylesheet" '
        'href="/static/app.css">'
    )
    script = f'<script src="/static/{_VENDOR}"></script>'
    html, hashes = _document(head, script, imports, "")
    # Scripts are the files of this server and the two in the document, which their hashes name.
    policy = (
        f"default-src 'none'; script-src 'self' {hashes}; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return html, policy


def alone(answers: Mapping[str, object], made: str) -> str:
    """Return the page as one file that needs no server.

    Args:
        answers: What the server would answer, by path.
        made: When it was made and what it leaves out, as a sentence.
    """
    # Modules are imported from data addresses, since a file has no server to ask.
    encoded = {name: base64.b64encode(text.encode()).decode() for name, text in modules().items()}
    imports = {
        f"slime/{name}": f"data:text/javascript;base64,{text}"
        for name, text in sorted(encoded.items())
    }
    style = "".join(
        f"<style>{assets()[name][1].decode()}</style>" for name in ("uplot.min.css", "app.css")
    )
    vendor = assets()[_VENDOR][1].decode()
    # Compressed and encoded, so that no text of a sample stands in the HTML.
    packed = base64.b64encode(
        gzip.compress(orjson.dumps({"made": made, "answers": answers}), 9)
    ).decode()
    data = f'<script type="application/octet-stream" id="slime-export">{packed}</script>'
    _, hashes = _document("", "", imports, "")
    policy = (
        f"default-src 'none'; script-src {hashes} '{_hash(vendor)}' data:; style-src "
        "'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
    )
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">{style}'
    return _document(head, f"<script>{vendor}</script>", imports, data)[0]


def _document(head: str, script: str, imports: Mapping[str, str], data: str) -> tuple[str, str]:
    """Return an HTML document, and the hashes of its own inline scripts for its policy."""
    table = json.dumps({"imports": imports})
    html = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="referrer" content="no-referrer">'
        f'<title>slime</title><link rel="icon" href="{ICON}">{head}'
        f'<script type="importmap">{table}</script></head><body><div id="app"></div>'
        "<noscript>This page needs JavaScript.</noscript>"
        f'{data}{script}<script type="module">{_MAIN}</script></body></html>\n'
    )
    return html, f"'{_hash(table)}' '{_hash(_MAIN)}'"


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
