"""What mkdocs needs beside mkdocs.yml: pages from outside docs/, links between pages, and GitHub's Markdown.

Pages are written for GitHub and for a text editor, and mention other pages as docs/NAME.md. In the site such a mention
is a link. A `<picture>`, by which GitHub follows the reader's system, becomes two images, one for each palette of the
site, of which the reader chooses.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Set
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")

_FENCE = re.compile(r"^ *(`{3,}|~{3,})")
_ITEM = re.compile(r"^( *)(?:[-*]|\d+\.) ")
# What of a line may become or contain a link: a link, a code span, a mention of a page.
_PARTS = re.compile(
    r"(?P<before>!?\[[^\]]*\]\()(?P<target>[^)\s]+)(?P<after>[^)]*\))"
    r"|`(?P<code>[^`]+)`"
    r"|(?<![\w/.-])(?P<mention>docs/[\w/.-]+\.md|CONTRIBUTING\.md|SECURITY\.md|CHANGELOG\.md)\b"
)
# An element over four lines: a source for the dark scheme, and the light image with its text.
_PICTURE = re.compile(
    r'<picture>\n\s*<source media="\(prefers-color-scheme: dark\)" srcset="(?P<dark>[^"]+)">\n'
    r'\s*<img alt="(?P<alt>[^"]+)" src="(?P<light>[^"]+)">\n</picture>'
)
_ELSEWHERE = re.compile(r"(?:[a-z][a-z0-9+.-]*:)?//|mailto:", re.IGNORECASE)
_REMOTE_IN_CSS = re.compile(r"(?:url\(|@import)\s*[\"']?((?:https?:)?//[^)\"']+)")


def records() -> list[Path]:
    """The records of measurements that have a page, relative to the repository; the newest comes first."""
    return [path.relative_to(ROOT) for path in sorted(ROOT.glob("records/*/README.md"), reverse=True)]


def on_config(config: Any) -> Any:
    explanation = next(part["Explanation"] for part in config.nav if "Explanation" in part)
    explanation.append({"Records": [path.as_posix() for path in records()]})
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages outside docs/, and what is beside a record's page."""
    beside = [each for page in records() for each in (ROOT / page.parent).rglob("*") if each.suffix in (".md", ".png")]
    for path in [*OUTSIDE, *(each.relative_to(ROOT).as_posix() for each in beside)]:
        file = File(path, str(ROOT), config.site_dir, use_directory_urls=False)
        if not path.endswith("README.md"):  # a figure, or a page that others link to
            file.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(file)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    source = page.file.src_uri
    place = source if source in OUTSIDE or source.startswith("records/") else f"docs/{source}"
    return as_python_markdown(markdown, place=place, pages={each.src_uri for each in files})


def as_python_markdown(text: str, *, place: str, pages: Set[str]) -> str:
    """A page as Python-Markdown reads it, which wants a blank line above a list, and 4 spaces before an inner item.

    place: the page's path in the repository. pages: the site's files, by their paths in the site.
    """
    lines: list[str] = []
    fence, in_list = "", False
    for line in _PICTURE.sub(_by_palette, text).splitlines():
        mark = _FENCE.match(line)
        if mark or fence:
            lines.append(line)
            if mark:
                fence = "" if fence and mark[1].startswith(fence) else fence or mark[1]
            continue
        item = _ITEM.match(line)
        if item and not in_list and lines and lines[-1].strip():
            lines.append("")
        in_list = bool(item) or (in_list and (not line.strip() or line.startswith(" ")))
        if item and len(item[1]) in (2, 3):
            line = "    " + line.lstrip()
        lines.append(line if line.startswith("#") else linked(line, place=place, pages=pages))
    return "\n".join(lines) + "\n"


def _by_palette(picture: re.Match[str]) -> str:
    return " ".join(f"![{picture['alt']}]({picture[form]}#only-{form})" for form in ("light", "dark"))


def linked(line: str, *, place: str, pages: Set[str]) -> str:
    """A line whose links lead to the site's pages, and whose mentions of pages are links."""

    def replaced(part: re.Match[str]) -> str:
        if part["target"]:
            path, mark, anchor = part["target"].partition("#")
            if not path or _ELSEWHERE.match(path):
                return part[0]
            repository = posixpath.normpath(posixpath.join(posixpath.dirname(place), path))
            found = _from(place, repository, pages)
            if not found and (ROOT / repository).exists():
                # The site has no address of this file, so the link's text stays alone.
                return part["before"].removeprefix("[").removesuffix("](")
            return f"{part['before']}{found or path}{mark}{anchor}{part['after']}"
        found = _from(place, part["code"] or part["mention"], pages)
        return f"[{part[0]}]({found})" if found else part[0]

    return _PARTS.sub(replaced, line)


def _from(place: str, repository: str, pages: Set[str]) -> str:
    """The way in the site from one page to another; empty if the site lacks that page. Both are repository paths."""
    for path in (repository, posixpath.join(repository, "README.md")):
        there, here = path.removeprefix("docs/"), place.removeprefix("docs/")
        if there in pages and there != here:
            return posixpath.relpath(there, posixpath.dirname(here) or ".")
    return ""


def on_post_build(config: Any) -> None:
    """Refuse a site that would load anything from another host."""
    loads = list(remote_loads(Path(config.site_dir)))
    if loads:
        raise PluginError(f"the site loads from other hosts: {'; '.join(loads[:5])}")


def remote_loads(site: Path) -> Iterator[str]:
    """FILE: ADDRESS of each script, style, picture and frame that a built page takes from another host."""
    for path in sorted(site.rglob("*")):
        if path.suffix == ".html":
            parser = _Loads()
            parser.feed(path.read_text("utf-8"))
            found = parser.found
        elif path.suffix == ".css":
            found = _REMOTE_IN_CSS.findall(path.read_text("utf-8"))
        else:
            continue
        yield from (f"{path.relative_to(site)}: {each}" for each in found)


class _Loads(HTMLParser):
    """Collects the remote addresses that a browser would load with a page; links for people are none."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        loaded = [named.get("src"), named.get("srcset"), named.get("href") if tag == "link" else None]
        self.found += [each for each in loaded if each and _ELSEWHERE.match(each)]
