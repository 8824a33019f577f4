"""What the documentation refers to exists: links, their headings, files that are named, and sections that are quoted.

Nothing is fetched, so addresses of other hosts are not checked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests import ROOT

# [text](target), ![text](target "title"); a text has no bracket of its own, except around an image.
_LINK = re.compile(r"\]\(\s*<?([^()\s>]*(?:\([^()\s]*\)[^()\s>]*)*)>?(?:\s+\"[^\"]*\")?\s*\)")
_SOURCE = re.compile(r'<(?:img|source)\b[^>]*?\b(?:src|srcset)="([^"]+)"')
_DEFINITION = re.compile(r"^\[[^\]]+\]:\s+(\S+)", re.MULTILINE)
_ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)
_HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*$")
_OWN_FILE = re.compile(
    r"(?<![\w/.$-])((?:docs|records|trainer|models|data|launch|tests|ds_configs)/[\w./-]*\.(?:md|py|toml|json|png|sh))\b"
)
_QUOTED_SECTION = re.compile(r"\b(docs/\w+\.md), \"([^\"]+?),?\"")


def pages(folder: Path) -> list[Path]:
    """The pages of a checkout."""
    tops = [folder / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")]
    return [
        *(page for page in tops if page.is_file()),
        *(page for name in ("docs", "records", ".github") for page in sorted((folder / name).rglob("*.md"))),
    ]


def without_code(text: str) -> str:
    """A page without its fenced blocks and code spans, which contain no links."""
    lines, fence = [], ""
    for line in text.splitlines():
        mark = re.match(r"\s*(`{3,}|~{3,})", line)
        if mark and not fence:
            fence = mark[1]
        elif mark and mark[1].startswith(fence) and line.strip() == mark[1]:
            fence = ""
        elif not fence:
            lines.append(line)
    return re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", "", "\n".join(lines), flags=re.DOTALL)


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    found: dict[str, int] = {}
    anchored = set()
    for title in headings(text):
        plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", title)
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        anchored.add(slug if slug not in found else f"{slug}-{found[slug]}")
        found[slug] = found.get(slug, 0) + 1
    return anchored


def headings(text: str) -> list[str]:
    fenced = False
    titles = []
    for line in text.splitlines():
        fenced ^= line.lstrip().startswith("```")
        match = _HEADING.match(line)
        if match and not fenced:
            titles.append(match[1])
    return titles


def broken(folder: Path) -> Iterator[str]:
    """One sentence for each reference of a checkout's pages that leads nowhere."""
    for page in pages(folder):
        text = page.read_text("utf-8")
        name = page.relative_to(folder)
        prose = without_code(text)
        for target in (*_LINK.findall(prose), *_DEFINITION.findall(prose), *_SOURCE.findall(prose)):
            if not _ELSEWHERE.match(target) and (wrong := _wrong_link(page, target)):
                yield f"{name}: ({target}) {wrong}"
        if name.parts[0] == "records":
            continue  # they say what was there on their day
        for path in sorted(set(_OWN_FILE.findall(text))):
            if not (folder / path).exists():
                yield f"{name}: {path} does not exist"
        for other, title in _QUOTED_SECTION.findall(" ".join(text.split())):
            if (folder / other).is_file() and title not in headings((folder / other).read_text("utf-8")):
                yield f'{name}: {other} has no section "{title}"'


def _wrong_link(page: Path, target: str) -> str:
    """What is wrong with a link; empty if nothing is."""
    path, _, anchor = unquote(target).partition("#")
    if path.startswith("/"):
        return "is absolute; write it relative to the page"
    place = (page.parent / path) if path else page
    if not place.exists():
        return "leads to no file"
    if anchor and (place.suffix != ".md" or anchor not in anchors(place.read_text("utf-8"))):
        return "leads to no heading"
    return ""


def test_every_reference_leads_somewhere() -> None:
    assert len(pages(ROOT)) > 15, "the pages are found"
    assert list(broken(ROOT)) == []


@pytest.mark.parametrize(
    ("line", "complaints"),
    [
        ("[there](other.md)", []),
        ("[there](other.md#two-words)", []),
        ("[there](other.md#two-words-1)", []),
        ("[here](#here)", []),
        ("![a picture](figures/there.png)", []),
        ("[elsewhere](https://example.org/nothing.md)", []),
        ("`[code](missing.md)`", []),
        ("```\n[code](missing.md)\n```", []),
        ("`trainer/there.py`", []),
        ('docs/other.md, "Two words"', []),
        ('<img alt="a picture" src="figures/there.png">', []),
        ('<img alt="no picture" src="figures/missing.png">', ["(figures/missing.png) leads to no file"]),
        ('<source srcset="figures/missing.png">', ["(figures/missing.png) leads to no file"]),
        ("[nowhere](missing.md)", ["(missing.md) leads to no file"]),
        ("[nowhere][1]\n\n[1]: missing.md", ["(missing.md) leads to no file"]),
        ("![no picture](figures/missing.png)", ["(figures/missing.png) leads to no file"]),
        ("[nowhere](other.md#three-words)", ["(other.md#three-words) leads to no heading"]),
        ("[nowhere](other.md#code)", ["(other.md#code) leads to no heading"]),
        ("[nowhere](#there)", ["(#there) leads to no heading"]),
        ("[absolute](/docs/other.md)", ["(/docs/other.md) is absolute; write it relative to the page"]),
        ("`trainer/missing.py`", ["trainer/missing.py does not exist"]),
        ("see docs/missing.md", ["docs/missing.md does not exist"]),
        ('docs/other.md, "Three words"', ['docs/other.md has no section "Three words"']),
    ],
)
def test_what_is_broken_is_named(line: str, complaints: Sequence[str], tmp_path: Path) -> None:
    """Negative controls, and references that are sound."""
    for name in ("docs/figures/there.png", "trainer/there.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "docs" / "other.md").write_text("# Other\n\n## Two words\n\n## Two `words`\n\n```\n# Code\n```\n")
    (tmp_path / "docs" / "page.md").write_text(f"# Here\n\n{line}\n")
    assert list(broken(tmp_path)) == [f"docs/page.md: {complaint}" for complaint in complaints]
