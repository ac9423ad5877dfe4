"""What must not be written where others read it: keys, tokens and passwords in names, URLs and commands."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"
_SECRET = re.compile(
    r"passw(or)?d|passphrase|secret|credential|bearer"
    r"|(^|_)(api|access|private|account|auth|client|service|wandb|hf|license)_?keys?($|_)"
    r"|apikey|(^|_)keys?$|(^|_)(auth|access|api|hf|hub|refresh|session|github|gh|slack|bot)_?token(s?$|_)|^token$"
)
_OF_DATA = re.compile(
    r"(^|_)(input|label|metadata|tool|reward|multimodal|routing|prompt|sort|group|cache|primary)_keys?$"
)
_PATH = re.compile(r"_(path|file|dir|name)$")
_USER_OF_URL = re.compile(r"(?<=://)[^/\s@'\"]+@")
_OPTION = re.compile(
    r"(?P<name>-{1,2}[A-Za-z][\w-]*)(?P<gap>=| +)(?P<value>'[^']*'|\"[^\"]*\"|[^\s'\"-][^\s'\"]*)"
    r"|(?P<variable>\b[A-Za-z_]\w*)=(?:'[^']*'|\"[^\"]*\"|[^\s'\"]+)"
)


def is_secret(name: str) -> bool:
    """Whether the value of a setting or variable with this name is a secret: ``wandb_key``, ``OPENAI_API_KEY``,
    ``ssl_keyfile_password``; but not ``input_key``, a column, nor ``max_tokens``."""
    plain = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
    return bool(_SECRET.search(plain)) and not _OF_DATA.search(plain) and not _PATH.search(plain)


def redacted(name: str, value: Any) -> Any:
    """``value`` as it may be shown: :data:`HIDDEN` for a secret, also inside of mappings, URLs and commands."""
    if is_secret(name) and value not in (None, "", False, [], {}):
        return HIDDEN
    if isinstance(value, Mapping):
        return {key: redacted(str(key), item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(redacted("", item) for item in value) if type(value) in (list, tuple) else value
    return redacted_text(value) if isinstance(value, str) else value


def redacted_text(text: str) -> str:
    """A text without the user part of URLs and the values of options and variables that are secrets."""
    text = _USER_OF_URL.sub(f"{HIDDEN}@", text)

    def hide(match: re.Match[str]) -> str:
        if match["variable"]:
            return f"{match['variable']}={HIDDEN}" if is_secret(match["variable"]) else match[0]
        return f"{match['name']}{match['gap']}{HIDDEN}" if is_secret(match["name"]) else match[0]

    return _OPTION.sub(hide, text) if "-" in text or "=" in text else text
