"""The page itself: its files, and the HTML that loads them from the server or has them all inside."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

import orjson

_TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html"}
ICON = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E%3Cpath d='M1 12c3 0 3-8 7-8s3 "
    "5 7 5' fill='none' stroke='%232f7d5b' stroke-width='2.5' stroke-linecap='round'/%3E%3C/svg%3E"
)
_MAIN = 'import "slime/main.js";'
_VENDOR = "uplot.min.js"


@cache
def assets() -> Mapping[str, tuple[str, bytes]]:
    """Return the content type and the content of each file of the page, by its name in an address."""
    found = {}
    static = files("slime.plugins.tools.ui") / "static"
    for folder in (static, static / "vendor"):
        for file in folder.iterdir():
            suffix = "." + file.name.rpartition(".")[2]
            if suffix in _TYPES and file.is_file():
                found[file.name] = (_TYPES[suffix], file.read_bytes())
    return found


def modules() -> dict[str, str]:
    """Return the page's own JavaScript modules by name."""
    return {
        name: content.decode() for name, (_, content) in assets().items() if name.endswith(".js") and name != _VENDOR
    }


def served() -> tuple[str, str]:
    """Return the HTML for the server, and its content security policy."""
    imports = {f"slime/{name}": f"/static/{name}" for name in sorted(modules())}
    head = '<link rel="stylesheet" href="/static/uplot.min.css"><link rel="stylesheet" href="/static/app.css">'
    script = f'<script src="/static/{_VENDOR}"></script>'
    html, hashes = _document(head, script, imports, "")
    policy = (
        f"default-src 'none'; script-src 'self' {hashes}; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return html, policy


def alone(answers: Mapping[str, object], made: str) -> str:
    """Return the page as one file that needs no server.

    Args:
        answers: What the server would answer, by path.
        made: When it was made and what it leaves out, as a sentence.
    """
    encoded = {name: base64.b64encode(text.encode()).decode() for name, text in modules().items()}
    imports = {f"slime/{name}": f"data:text/javascript;base64,{text}" for name, text in sorted(encoded.items())}
    style = "".join(f"<style>{assets()[name][1].decode()}</style>" for name in ("uplot.min.css", "app.css"))
    vendor = assets()[_VENDOR][1].decode()
    # Compressed and encoded, so that no text of a sample stands in the HTML.
    packed = base64.b64encode(gzip.compress(orjson.dumps({"made": made, "answers": answers}), 9)).decode()
    data = f'<script type="application/octet-stream" id="slime-export">{packed}</script>'
    _, hashes = _document("", "", imports, "")
    policy = (
        f"default-src 'none'; script-src {hashes} '{_hash(vendor)}' data:; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
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
