"""From the path of a request to what it answers. The server, the export and the tests use the same
function.

A part of a path is a key of a run, a number, or a name that is looked up in what is known; none of
them becomes part of a path of the file system without being compared with what exists.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from urllib.parse import quote, unquote

import orjson

from slime.plugins.tools.ui import views
from slime.plugins.tools.ui.runs import Run, Runs


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
        case ["api", "run", key, *rest] if rest:
            run = runs.get(key)
            if run is None:
                raise NotFound(f"there is no run {key!r}")
            found = _of_run(run, rest)
            if found is not None:
                return found
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


def _of_run(run: Run, parts: Sequence[str]) -> views.View | None:
    match parts:
        case ["overview"]:
            return views.overview(run)
        case ["doctor"]:
            return views.doctor(run)
        case ["series", name]:
            return run.series.curve(name)
        case ["steps"]:
            return views.steps(run)
        case ["step", number]:
            return views.step(run, _number(number))
        case ["timeline", number]:
            return views.step_timeline(run, _number(number))
        case ["sample", kind, number, position]:
            return views.sample(run, kind, _number(number), _number(position))
        case ["tokens", number, index]:
            return run.tokens.sample(_number(number), _number(index))
        case ["prompts"]:
            return views.prompts(run)
        case ["prompt", key]:
            return views.prompt(run, key)
        case ["evaluations"]:
            return views.evaluations(run)
        case ["evaluation", name, before, after]:
            return views.comparison(run, name, _number(before), _number(after))
        case ["ledger"]:
            return views.ledger(run)
        case ["engines"]:
            return views.engines(run)
    return None


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 15):
        raise NotFound(f"{text!r} is not a number")
    return int(text)


def path_of(*parts: object) -> str:
    """Return the path of which :func:`answer` reads ``parts``."""
    return "/api/" + "/".join(quote(str(part), safe="") for part in parts)
