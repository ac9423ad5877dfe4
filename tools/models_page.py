"""``python tools/models_page.py``: do what docs/en/models.md says with every family, and write its
tables.

A row says what a tiny random model of the family did here: packs with and without shared prompts
and with recomputed layers, padded batches, the embedded engine; with biases and tied embeddings,
and with neither. What is refused must be refused with a reason. A family that does not do what its
row says ends the tool with an error, and nothing is written. The page gets the versions and the
date of the run.

With names of families (``python tools/models_page.py GLM-5 "Llama 4"``) the tool checks their rows
only. It writes the tables then too, but not the versions and the date, which are those of the last
run of all families.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "en" / "models.md"
sys.path[:0] = [
    str(ROOT / part)
    for part in (".", "tests", "tests/models", "tests/engines", "tests/plugins/embedded")
]

from every_family import FAMILIES, save_tiny, tiny_config  # noqa: E402
from family_checks import check_packed, check_padded  # noqa: E402
from test_engine_families import check_engine, saved  # noqa: E402

from slime.models.layer_kinds import layers_of  # noqa: E402
from slime.models.loading import ModelError, empty_model, plain_attention  # noqa: E402
from slime.models.packed_attention import NAME  # noqa: E402
from slime.models.packed_layers import prepare_packing  # noqa: E402
from slime.plugins.embedded.states import use_slots  # noqa: E402
from slime.plugins.megatron.maps.family import get_family  # noqa: E402

HEADINGS = (
    "family",
    "`model_type`",
    "kinds of layers",
    "FSDP packed",
    "FSDP padded",
    "embedded engine",
    "Megatron",
)
BIASES = (
    *("attention_bias", "attention_out_bias", "mlp_bias"),
    *("use_bias", "use_conv_bias", "conv_bias", "mamba_proj_bias", "mamba_conv_bias"),
)
RAN = re.compile(r"it last ran with transformers\s+\S+\s+and torch\s+\S+\s+on a CPU on\s+[\d-]+")
_TABLE = re.compile(r"^\| family .*?\n\n", re.DOTALL | re.MULTILINE)


def cells(family: str) -> list[str]:
    """Return the row of a family, as its config and its modules say."""
    config = tiny_config(family)
    layers = layers_of(empty_model(config), "")
    return [
        family,
        f"`{config.model_type}`",
        ", ".join(kind.name for kind in layers.kinds),
        _packed(family),
        plain_attention(config),
        _served(family),
        _megatron(config.model_type),
    ]


def _packed(family: str) -> str:
    try:
        prepare_packing(empty_model(tiny_config(family), attn_implementation=NAME))
    except ModelError:
        return "no"
    return "yes"


def _served(family: str) -> str:
    try:
        use_slots(empty_model(tiny_config(family)))
    except ModelError:
        return "no"
    return "yes"


def _megatron(model_type: str) -> str:
    try:
        get_family(model_type)
    except ValueError:
        return "no"
    return "yes"


def table() -> str:
    """Return the table of families, in Markdown, with an empty line after it: a row for those that
    are alike, without columns that are always yes."""
    families = list(map(cells, FAMILIES))
    shown = [i for i in range(2, len(HEADINGS)) if any(row[i] != "yes" for row in families)]
    alike: dict[tuple[str, ...], list[str]] = {}
    for row in families:
        alike.setdefault(tuple(row[i] for i in shown), []).append(f"{row[0]} ({row[1]})")
    rows = [("family (`model_type`)", *(HEADINGS[i] for i in shown))]
    rows += [(", ".join(names), *row) for row, names in alike.items()]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]]) + "\n\n"


def check_family(family: str, folder: Path, variants: Sequence[bool] = (False, True)) -> None:
    """Do what the row of a family says: with tied embeddings and biases (True), and with neither.

    Raises:
        AssertionError: Numbers differ, or something is not refused that the row says is.
        ModelError: Something is refused that the row says is not.
    """
    _, _, _, packed, padded, engine, _ = cells(family)
    config = tiny_config(family)
    # Released models of Gemma 4 have no biases, and with random ones its gradients are within 3e-5
    # only.
    biases = () if family == "Gemma 4" else BIASES
    for both in variants:
        changes = {name: both for name in ("tie_word_embeddings", *biases) if hasattr(config, name)}
        model = save_tiny(family, folder / f"both {both}", **changes)
        if packed == "yes":
            check_packed(model)
        else:
            _check_refused(lambda model=model: check_packed(model), "--attn-implementation sdpa")
    check_padded(model, padded)
    served = saved(family, folder / "served", **changes)
    if engine == "yes":
        check_engine(served)
    else:
        _check_refused(lambda: check_engine(served), "use an SGLang engine")


def _check_refused(work: object, advice: str) -> None:
    assert callable(work)
    try:
        work()
    except ModelError as error:
        assert advice in str(error), error
    else:
        raise AssertionError("it is not refused")


def main(families: Sequence[str]) -> None:
    for family in families or FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            check_family(family, Path(folder))
        print(family, flush=True)
    text = _TABLE.sub(lambda _: table(), PAGE.read_text(encoding="utf-8"), count=1)
    PAGE.write_text(text if families else _with_run(text), encoding="utf-8")


def _with_run(text: str) -> str:
    """Return the page with the versions and the date of this run."""
    short = {
        name: ".".join(importlib.metadata.version(name).split(".")[:2])
        for name in ("transformers", "torch")
    }
    ran = (
        f"it last ran with transformers {short['transformers']}\n"
        f"and torch {short['torch']} on a CPU on {datetime.datetime.now(datetime.UTC).date()}"
    )
    text, replaced = RAN.subn(ran, text)
    assert replaced == 1, "the page has no line about the last run"
    return text


if __name__ == "__main__":
    main(sys.argv[1:])
