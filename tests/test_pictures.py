"""The explanatory pictures are those that docs/site/pictures.py draws, small, and readable as text."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from models.sizes import STARBUCKS_LADDER
from tests import ROOT

_spec = importlib.util.spec_from_file_location("site_pictures", ROOT / "docs" / "site" / "pictures.py")
assert _spec is not None and _spec.loader is not None
pictures = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = pictures  # its dataclasses look their module up
_spec.loader.exec_module(pictures)

LARGEST_BYTES = 60_000
FILES = dict(pictures.files())


def texts_of(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_it_is_what_the_code_draws(path: Path) -> None:
    assert path.read_text("utf-8") == FILES[path], "draw it again: python docs/site/pictures.py"
    assert path.stat().st_size < LARGEST_BYTES
    assert texts_of(FILES[path])


def test_both_forms_have_the_same_words_in_other_colours() -> None:
    for name in pictures.PICTURES:
        light, dark = (FILES[pictures.FIGURES / f"{name}_{theme}.svg"] for theme in ("light", "dark"))
        assert texts_of(light) == texts_of(dark) and light != dark


def test_the_ladder_has_every_size() -> None:
    texts = texts_of(FILES[pictures.FIGURES / "ladder_light.svg"])
    for size in STARBUCKS_LADDER:
        assert f"{size.layers} layers × {size.dim}" in texts
