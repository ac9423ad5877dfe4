"""The table of docs/en/models.md is what tiny random models of every family do."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "models"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "engines"))
from every_family import FAMILIES, save_tiny, tiny_config
from family_checks import check_packed, check_padded
from test_engine_families import check_engine, saved

from slime.models.layer_kinds.registry import all_kinds, layers_of
from slime.models.loading import ModelError, empty_model, plain_attention
from slime.weights.maps.registry import get_family

PAGE = Path(__file__).resolve().parents[2] / "docs/en/models.md"


def rows(first: str) -> dict[str, list[str]]:
    """The cells of the table whose first heading is ``first``, by the first cell."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first} |"))
    table = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        table.append([cell.strip(" `") for cell in line.strip("|").split("|")])
    return {cells[0]: cells[1:] for cells in table}


def megatron(model_type: str) -> str:
    try:
        get_family(model_type)
    except ValueError:
        return "no"
    return "yes"


def test_the_page_lists_what_the_config_says() -> None:
    """The model types, the kinds of layers, what is refused because of them, and the Megatron maps."""
    page = rows("family")
    assert list(page) == list(FAMILIES)
    for family, (model_type, kinds, packed, padded, engine, map_) in page.items():
        config = tiny_config(family)
        layers = layers_of(empty_model(config), "")
        found = [
            config.model_type,
            ", ".join(kind.name for kind in layers.kinds),
            "no" if any(kind.not_packed for kind in layers.kinds) else "yes",
            plain_attention(config),
            "no" if any(kind.not_served for kind in layers.kinds) else "yes",
            megatron(config.model_type),
        ]
        assert [model_type, kinds, packed, padded, engine, map_] == found, family


def test_the_page_lists_the_kinds() -> None:
    page = rows("kind of layer")
    for kind in all_kinds():
        packed, context, engine = page.pop(kind.name)
        assert (packed == "refused") == bool(kind.not_packed), kind.name
        assert (context == "refused") == bool(kind.not_packed or kind.not_context_parallel), kind.name
        assert (engine == "refused") == bool(kind.not_served), kind.name
    assert not page


@pytest.mark.slow
def test_every_family_does_what_the_page_says(tmp_path: Path) -> None:
    """Packed with tied and untied embeddings, padded, and in the embedded engine."""
    for family, (_, _, packed, padded, engine, _) in rows("family").items():
        for tied in (False, True):
            folder = save_tiny(family, tmp_path / f"{family} {tied}", tie_word_embeddings=tied)
            if packed == "yes":
                check_packed(folder)
                continue
            with pytest.raises(ModelError, match="--attn-implementation sdpa"):
                check_packed(folder)
        check_padded(folder, padded)
        folder = saved(family, tmp_path / f"{family} served")
        if engine == "yes":
            check_engine(folder)
            continue
        with pytest.raises(ModelError, match="use an SGLang engine"):
            check_engine(folder)
