"""The command line of a server: the options that the user gave, in the spelling of their owner."""

from __future__ import annotations

from collections.abc import Mapping

from slime.config.passthrough import (
    ROUTER_VERSION,
    engine_options,
    load_table,
    sglang_table_version,
)


def command_line(family: str, given: Mapping[str, object], version: str | None = None) -> list[str]:
    """Return the command-line words that pass ``given`` to the package that owns the options.

    >>> command_line("sglang", {"mem_fraction_static": 0.7, "disable_radix_cache": True})
    ['--mem-fraction-static', '0.7', '--disable-radix-cache']
    """
    if family in ("sglang", "router"):
        version = version or (sglang_table_version() if family == "sglang" else ROUTER_VERSION)
        table = load_table("sglang" if family == "sglang" else "sglang_router", version)
    else:
        table = engine_options()[family].entries
    # Of several spellings, the one that is the name of the attribute comes first.
    spelling: dict[str, str] = {}
    for option, entry in sorted(
        table.items(), key=lambda item: item[0] != "--" + item[1]["dest"].replace("_", "-")
    ):
        spelling.setdefault(entry["dest"], option)
    words: list[str] = []
    for name, value in given.items():
        # not in the table: the owner rejects or takes it
        option = spelling.get(name) or "--" + name.replace("_", "-")
        if isinstance(value, bool):
            entry = table.get(option, {"kind": "switch"})
            toggle = entry["kind"] == "toggle"  # without a default, it is None: the package decides
            default = (
                entry.get("default")
                if toggle
                else bool(entry.get("default", entry["kind"] == "negative"))
            )
            words += (
                []
                if value == default
                else [f"--no-{option[2:]}" if toggle and not value else option]
            )
        elif isinstance(value, (list, tuple)):
            words += [option, *map(str, value)]
        else:
            words += [option, str(value)]
    return words
