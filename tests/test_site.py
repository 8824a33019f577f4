"""The documentation as a site: what docs/site/hooks.py makes of pages that are written for GitHub."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests import ROOT

_spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs" / "site" / "hooks.py")
assert _spec is not None and _spec.loader is not None
hooks = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(hooks)

PAGES = {"README.md", "CONTRIBUTING.md", "data.md", "figures/a.png", "records/x/README.md", "records/x/table.md"}


@pytest.mark.parametrize(
    ("page", "for_python"),
    [
        ("Text:\n- one\n  more\n- two\n", "Text:\n\n- one\n  more\n- two\n"),
        ("Text:\n1. one\n2. two\n", "Text:\n\n1. one\n2. two\n"),
        ("- one:\n  - inner\n    more\n- two\n", "- one:\n    - inner\n    more\n- two\n"),
        ("- one\n\n  more\n- two\n", "- one\n\n  more\n- two\n"),
        ("Text\n```\n- code\n```\n", "Text\n```\n- code\n```\n"),
        ("Text\n~~~\n```\n- code\n~~~\nText\n- one\n", "Text\n~~~\n```\n- code\n~~~\nText\n\n- one\n"),
        ("3 − 2\n− 1\n", "3 − 2\n− 1\n"),
    ],
)
def test_lists_are_lists_in_python_markdown_too(page: str, for_python: str) -> None:
    assert hooks.as_python_markdown(page, place="docs/page.md", pages=PAGES) == for_python


def test_a_picture_follows_the_palette_of_the_site() -> None:
    page = """<picture>
  <source media="(prefers-color-scheme: dark)" srcset="figures/a_dark.svg">
  <img alt="What it shows" src="figures/a_light.svg">
</picture>
"""
    pages = {"figures/a_light.svg", "figures/a_dark.svg"}
    shown = hooks.as_python_markdown(page, place="docs/page.md", pages=pages)
    light, dark = (f"![What it shows](figures/a_{form}.svg#only-{form})" for form in ("light", "dark"))
    assert shown == f"{light} {dark}\n"
    # A picture of another form is left as it is; then every reader sees the light one.
    other = page.replace("<img", "<img width='3'")
    assert hooks.as_python_markdown(other, place="docs/page.md", pages=pages) == other


@pytest.mark.parametrize(
    ("place", "line", "shown"),
    [
        ("docs/page.md", "see docs/data.md.", "see [docs/data.md](data.md)."),
        ("docs/page.md", "see `docs/data.md`.", "see [`docs/data.md`](data.md)."),
        (
            "docs/page.md",
            "(docs/data.md, CONTRIBUTING.md)",
            "([docs/data.md](data.md), [CONTRIBUTING.md](CONTRIBUTING.md))",
        ),
        ("docs/page.md", "`records/x/` has it", "[`records/x/`](records/x/README.md) has it"),
        ("docs/page.md", "[the data](data.md#on-disk)", "[the data](data.md#on-disk)"),
        ("docs/page.md", "![a](figures/a.png)", "![a](figures/a.png)"),
        ("docs/page.md", "[the list](../records/x/table.md)", "[the list](records/x/table.md)"),
        ("docs/page.md", "[start](../README.md#two-commands)", "[start](README.md#two-commands)"),
        ("docs/page.md", "[the code](../trainer/loop.py)", "the code"),
        ("docs/page.md", "[nowhere](missing.md)", ""),  # mkdocs finds it and warns
        ("docs/page.md", "[here](#here), [there](https://example.org/docs/data.md)", ""),
        ("docs/page.md", "docs/data.md and docs/missing.md", "[docs/data.md](data.md) and docs/missing.md"),
        ("docs/page.md", "smae/README.md, my/docs/data.md, `python docs/data.md`", ""),
        ("docs/data.md", "docs/data.md", ""),
        ("README.md", "![a](docs/figures/a.png) docs/data.md", "![a](figures/a.png) [docs/data.md](data.md)"),
        ("records/x/README.md", "docs/data.md [t](table.md)", "[docs/data.md](../../data.md) [t](table.md)"),
    ],
)
def test_mentions_of_pages_are_links(place: str, line: str, shown: str) -> None:
    """An empty `shown` stands for the line as it is."""
    assert hooks.linked(line, place=place, pages=PAGES) == (shown or line)


@pytest.mark.parametrize(
    ("name", "content", "loads"),
    [
        ("page.html", '<script src="https://example.org/a.js"></script>', ["https://example.org/a.js"]),
        ("page.html", '<link rel="stylesheet" href="//example.org/a.css">', ["//example.org/a.css"]),
        ("page.html", '<img src="http://example.org/a.png">', ["http://example.org/a.png"]),
        ("page.css", "@import 'https://example.org/a.css';", ["https://example.org/a.css"]),
        ("page.css", "a { background: url(//example.org/a.png) }", ["//example.org/a.png"]),
        ("page.html", '<script src="assets/a.js"></script><img src="data:image/png;base64,AA==">', []),
        ("page.html", '<a href="https://example.org">for people</a>', []),
        ("page.css", "a { background: url(a.png) }", []),
    ],
)
def test_what_a_page_would_load_from_another_host_is_found(
    name: str, content: str, loads: list[str], tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content)
    assert list(hooks.remote_loads(tmp_path)) == [f"{name}: {each}" for each in loads]
