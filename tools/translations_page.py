"""``python tools/translations_page.py``: write docs/en/reference/other_frameworks.md from the table
of ``slime translate``."""

from __future__ import annotations

from pathlib import Path

from slime.plugins.compat.frameworks import TARGET, tables

PAGE = Path(__file__).resolve().parents[1] / "docs" / "en" / "reference" / "other_frameworks.md"
_NAMES = {"verl": "verl", "openrlhf": "OpenRLHF", "trl": "TRL", "prime-rl": "prime-rl"}
_FORMS = {
    "on": "",  # the head says so
    "off": "if false",
    "given": "without its value",
    "per_group": "times the group size",
    "per_engine": "times the GPUs of an engine",
    "groups": "divided by the group size",
    "loss": "with `--use-kl-loss`, otherwise `--kl-coef`",
    "kl": "with `--use-kl-loss`, unless it is 0",
    "positive": "if it is above 0",
    "reward": "by the name of the function",
}
_HEAD = """\
# Flags of verl, OpenRLHF, TRL and prime-rl

<!-- Made by `python tools/translations_page.py`; do not edit. -->

`slime translate` translates a launch script or a command with these tables. A switch of slime is given if the other
flag is true. The keys of prime-rl's TOML files (`rl @ FILE.toml`) are flags of the same names.
[Coming from another framework](../coming_from.md) compares the concepts.
"""


def page() -> str:
    """The whole page."""
    parts = [_HEAD]
    for name, table in tables().items():
        same, others = [], dict[str, list[str]]()
        for flag, target in table["flags"].items():
            meaning = _meaning(target, table["values"])
            if meaning == f"`{flag.replace('_', '-')}`":
                same.append(f"`{flag}`")
            else:
                others.setdefault(meaning, []).append(f"`{flag}`")
        parts.append(f"## {_NAMES[name]}\n")
        if same:
            parts.append(f"The same name with dashes: {', '.join(same)}.\n")
        parts += [f"- {', '.join(flags)}: {meaning}" for meaning, flags in others.items()]
        if defaults := table.get("defaults"):
            named = ", ".join(f"`{flag}` {value}" for flag, value in defaults.items())
            parts.append(f"\nWhere it is not given, these are added as they are there: {named}.")
        parts.append("")
    return "\n".join(parts)


def _meaning(target: str, values: dict[str, dict[str, str]]) -> str:
    if " + " in target:
        return " and ".join(_meaning(part, values) for part in target.split(" + "))
    found = TARGET.fullmatch(target)
    if found is None:
        return target
    words = [f"`{' '.join(part for part in (found[1], found[2]) if part)}`"]
    form = found[3] or ""
    if form.startswith("is_"):
        words.append(f"for `{form.removeprefix('is_').replace('_', '-')}`")
    elif _FORMS.get(form):
        words.append(_FORMS[form])
    words += (
        [f"({', '.join(f'`{a}` is `{b}`' for a, b in values[found[1]].items())})"]
        if found[1] in values
        else []
    )
    return " ".join(words)


if __name__ == "__main__":
    PAGE.write_text(page())
