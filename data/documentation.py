"""A corpus that every machine has: the documentation inside the installed packages.

What is decided here:
- Docstrings (and numpy's and torch's add_newdoc/add_docstr texts, and pydoc's language topics) are found by parsing
  source files. Nothing is imported, which is quick and safe.
- Pre-training documents are whole docstrings; small ones are joined with their neighbours in the same class or module.
- A docstring's first paragraph and the rest make a (summary, body) pair: a natural query and its passage. Packages copy
  many docstrings, so no two pairs have the same summary or the same body, apart from case, spacing, punctuation and
  numbers.
- The held-out pairs are those whose bodies have the smallest hashes, so that they are the same on every machine with
  the same packages. Their texts are removed from the documents and the training pairs.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import hashlib
import inspect
import itertools
import json
import logging
import multiprocessing
import re
import signal
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

from data.ground.errors import DataError

logger = logging.getLogger(__name__)

STANDARD_LIBRARY = "stdlib"
DOCUMENTED_PACKAGES = (
    STANDARD_LIBRARY,
    "numpy",
    "scipy",
    "torch",
    "transformers",
    "pandas",
    "sklearn",
    "sympy",
    "networkx",
    "matplotlib",
)
SHORTEST_BODY_WORDS = 15
SHORTEST_SUMMARY_WORDS = 3
LONGEST_SUMMARY_WORDS = 48
SHORTEST_DOCUMENT_WORDS = 20
# Docstrings of fewer words are joined with their neighbours, so that a document fills a useful part of a window.
SMALL_DOCUMENT_WORDS = 60
JOINED_DOCUMENT_WORDS = 150

_LEFT_OUT_FOLDERS = {"test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo", "site-packages", "__pycache__"}
_ROLE = re.compile(r":[a-zA-Z]+(?::[a-zA-Z]+)*:`~?!?([^`]*)`")
_LITERAL = re.compile(r"(?<!`)``([^`]+)``(?!`)")
_ADORNMENT = re.compile(r"^[ \t]*([=\-~^*#\"'+.])\1{3,}[ \t]*$", re.MULTILINE)
_BLANK_LINES = re.compile(r"\n[ \t]*\n[ \t\n]*\n")
_SIGNATURE = re.compile(r"[\w.]+\s*\(.*\)(\s*(->|=|:|--).*)?", re.DOTALL)
# Replaces every ASCII byte that is not a letter by a space; the bytes of other scripts stay.
_LETTERS_ONLY = bytes(byte if byte >= 128 or chr(byte).isalpha() else ord(" ") for byte in range(256))


@dataclass(frozen=True)
class Docstring:
    name: str  # qualified: package.module.Class.method
    group: str  # the class or module that contains it
    text: str  # cleaned


@dataclass(frozen=True)
class DocumentationPair:
    """A docstring's first paragraph and the rest of it."""

    name: str
    summary: str
    body: str


@dataclass(frozen=True)
class Documentation:
    """The result of `installed_documentation`; no text of `held_out` occurs in `documents` or `pairs`."""

    documents: list[str]
    pairs: list[DocumentationPair]
    held_out: list[DocumentationPair]
    distractors: list[DocumentationPair] = field(repr=False)  # those of `pairs` whose bodies join the evaluation corpus


def installed_documentation(
    packages: Sequence[str] | None = None,
    *,
    num_held_out: int = 500,
    num_bodies: int = 5000,
    processes: int = 1,
) -> Documentation:
    """Documents for pre-training and (summary, body) pairs from the docstrings of installed packages.

    `num_bodies` is the size of the evaluation corpus: the held-out bodies, and training bodies as distractors.
    """
    docstrings = installed_docstrings(packages, processes=processes)
    pairs = list(_distinct_pairs(docstrings))
    ranked = sorted(pairs, key=lambda pair: _digest(pair.body))
    if num_held_out < 1 or num_bodies < num_held_out:
        raise DataError(
            f"{num_held_out} held-out pairs of {num_bodies} bodies make no evaluation; hold out at least 1 pair, and "
            "give at least as many bodies"
        )
    if len(pairs) <= num_held_out:
        raise DataError(
            f"only {len(pairs)} (summary, body) pairs were found, too few to hold out {num_held_out}; "
            "name more packages or hold out fewer"
        )
    held_out = ranked[:num_held_out]
    secrets = _Secrets.of(held_out)
    chosen = set(held_out)
    kept = [pair for pair in pairs if pair not in chosen and not secrets.occur_in(f"{pair.summary}\n{pair.body}")]
    training = set(kept)
    distractors = [pair for pair in ranked[num_held_out:] if pair in training][: num_bodies - num_held_out]
    open_docstrings = (docstring for docstring in docstrings if not secrets.occur_in(docstring.text))
    return Documentation(list(_documents_of(open_docstrings)), kept, held_out, distractors)


def installed_docstrings(packages: Sequence[str] | None = None, *, processes: int = 1) -> list[Docstring]:
    """The docstrings of packages and the standard library, sorted by module; absent default packages are left out."""
    files: list[tuple[str, str]] = []
    for package in packages or DOCUMENTED_PACKAGES:
        root = _package_folder(package)
        if root is None:
            if packages:
                raise DataError(f"package {package!r} is not installed here; install it or leave it out")
            logger.info("package %s is not installed, its documentation is left out", package)
            continue
        prefix = "" if package == STANDARD_LIBRARY else f"{package}."
        for path in sorted(root.rglob("*.py")):
            inside = path.relative_to(root)
            if not _LEFT_OUT_FOLDERS.intersection(inside.parts[:-1]):
                module = prefix + ".".join(inside.with_suffix("").parts)
                files.append((str(path), module.removesuffix(".__init__")))
    # Spread large files over the batches, so that the processes end at about the same time.
    files.sort(key=lambda entry: (-Path(entry[0]).stat().st_size, entry))
    batches = [files[start::64] for start in range(min(64, len(files)))]
    if processes <= 1:
        found = [_docstrings_of(batch) for batch in batches]
    else:
        with without_interrupts():
            pool = multiprocessing.get_context("spawn").Pool(min(processes, len(batches)))
        with pool:
            found = pool.map(_docstrings_of, batches, chunksize=1)
    by_module = dict(sorted(itertools.chain.from_iterable(found)))
    return [docstring for docstrings in by_module.values() for docstring in docstrings]


@contextlib.contextmanager
def without_interrupts() -> Iterator[None]:
    """Processes started in this context ignore Ctrl-C, which the terminal sends to the whole process group.

    The parent alone decides when they end. The signal mask is inherited, so that not even a process that is still
    starting dies with a traceback.
    """
    # The first spawned process would start the resource tracker, which unblocks SIGINT. Start it before blocking.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _package_folder(package: str) -> Path | None:
    if package == STANDARD_LIBRARY:
        return Path(sysconfig.get_paths()["stdlib"])
    if not package.isidentifier():
        raise DataError(f"package {package!r} is no top-level import name; give a name such as numpy")
    # find_spec does not run the package if the name is a top-level one.
    spec = find_spec(package)
    locations = list(spec.submodule_search_locations or []) if spec else []
    return Path(locations[0]) if locations else None


def _docstrings_of(files: Sequence[tuple[str, str]]) -> list[tuple[str, list[Docstring]]]:
    """(module, its docstrings in source order) of each (path, module)."""
    found = []
    # Syntax trees are many small objects without reference cycles: the garbage collector would scan them in vain.
    collecting = gc.isenabled()
    gc.disable()
    for path, module in files:
        try:
            source = Path(path).read_text(encoding="utf-8")
            if '"""' not in source and "'''" not in source and not module.startswith("pydoc_data"):
                continue
            tree = ast.parse(source)
        except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
            # Packages contain templates and files for other Python versions, which do not parse.
            continue
        docstrings = list(_topics(tree) if module == "pydoc_data.topics" else _walk(tree, module))
        if docstrings:
            found.append((module, docstrings))
    if collecting:
        gc.enable()
    return found


def _walk(tree: ast.Module, module: str) -> Iterator[Docstring]:
    stack: list[tuple[ast.AST, str, str]] = [(tree, module, module)]
    while stack:
        node, name, group = stack.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if text := clean_docstring(ast.get_docstring(node) or ""):
                yield Docstring(name, group, text)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield from _added_docstring(node.value, module)
            continue
        children = [
            child
            for child in ast.iter_child_nodes(node)
            if isinstance(
                child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.If | ast.Try | ast.With | ast.Expr
            )
        ]
        for child in reversed(children):
            own = getattr(child, "name", None)
            inner = name if isinstance(node, ast.Module | ast.ClassDef) else group
            stack.append((child, f"{inner}.{own}" if own else inner, inner))


def _added_docstring(call: ast.Call, module: str) -> Iterator[Docstring]:
    """Documentation of compiled functions: numpy's add_newdoc(place, name, text), torch's add_docstr(object, text)."""
    function = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if function not in ("add_newdoc", "add_docstr"):
        return
    parts: list[str] = []
    for argument in call.args:
        if isinstance(argument, ast.Tuple) and argument.elts:
            argument = argument.elts[-1] if isinstance(argument.elts[-1], ast.Constant) else argument.elts[0]
        if isinstance(argument, ast.Call) and isinstance(argument.func, ast.Attribute):
            argument = argument.func.value  # r"""...""".format(...)
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
            parts.append(argument.value)
        elif isinstance(argument, ast.Attribute | ast.Name):
            parts.append(ast.unparse(argument))
    if len(parts) >= 2 and (text := clean_docstring(inspect.cleandoc(parts[-1]))):
        yield Docstring(".".join(parts[:-1]), module, text)


def _topics(tree: ast.Module) -> Iterator[Docstring]:
    """The topics of the language reference, which pydoc keeps as a dictionary of texts."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values):
                texts = [str(part.value) for part in (key, value) if isinstance(part, ast.Constant)]
                if len(texts) == 2 and (text := clean_docstring(texts[1])):
                    yield Docstring(f"topics.{texts[0]}", "topics", text)


def clean_docstring(text: str) -> str:
    """The docstring as plain prose: reST roles, quotes of literals and underlines are removed, the rest is kept."""
    text = _LITERAL.sub(r"\1", _ROLE.sub(r"\1", text))
    text = "\n".join(line.rstrip() for line in _ADORNMENT.sub("", text).expandtabs().splitlines())
    return _BLANK_LINES.sub("\n\n", text).strip()


def split_summary(text: str) -> tuple[str, str] | None:
    """(first paragraph in one line, the rest), or None if a docstring has no such parts.

    Signatures at the beginning, which compiled functions have, belong to neither part.
    """
    paragraphs = [part for part in re.split(r"\n[ \t]*\n", text) if part.strip()]
    while len(paragraphs) > 1 and _SIGNATURE.fullmatch(paragraphs[0].strip()):
        paragraphs = paragraphs[1:]
    summary = " ".join(paragraphs[0].split()) if paragraphs else ""
    body = "\n\n".join(paragraphs[1:])
    # "Args:" and similar lines are headings, not summaries.
    if not SHORTEST_SUMMARY_WORDS <= len(summary.split()) <= LONGEST_SUMMARY_WORDS or summary.endswith(":"):
        return None
    prose_words = sum(len(line.split()) for line in body.splitlines() if not line.lstrip().startswith((">>>", "...")))
    if summary.startswith((">>>", "..", ":", "-", "*", "@", "|")) or prose_words < SHORTEST_BODY_WORDS:
        return None
    return summary, body


def _key(text: str) -> bytes:
    """A key that is equal for copies of a text that differ in case, spacing, punctuation or numbers only."""
    return b" ".join(text.lower().encode("utf-8", "replace").translate(_LETTERS_ONLY).split())


def _distinct_pairs(docstrings: Iterable[Docstring]) -> Iterator[DocumentationPair]:
    summaries: set[bytes] = set()
    bodies: set[bytes] = set()
    names: set[str] = set()
    for docstring in docstrings:
        parts = split_summary(docstring.text)
        if parts is None:
            continue
        summary, body = _key(parts[0]), _key(parts[1])
        if not summary or summary in summaries or body in bodies:
            continue
        summaries.add(summary)
        bodies.add(body)
        name = docstring.name
        count = 1
        while name in names:
            count += 1
            name = f"{docstring.name}#{count}"
        names.add(name)
        yield DocumentationPair(name, *parts)


@dataclass(frozen=True)
class _Secrets:
    """The held-out texts, which are also found as parts of longer texts."""

    summaries: frozenset[bytes]  # keys
    bodies: Mapping[str, list[bytes]]  # keys of the bodies by their longest line

    @classmethod
    def of(cls, pairs: Iterable[DocumentationPair]) -> _Secrets:
        bodies: dict[str, list[bytes]] = {}
        for pair in pairs:
            longest = max((line.strip() for line in pair.body.splitlines()), key=len)
            bodies.setdefault(longest, []).append(_key(pair.body))
        return cls(frozenset(_key(pair.summary) for pair in pairs), bodies)

    def occur_in(self, text: str) -> bool:
        parts = split_summary(text)
        if parts is not None and _key(parts[0]) in self.summaries:
            return True
        # One dictionary look-up per line finds the few bodies that are worth a substring search.
        found = [body for line in text.splitlines() for body in self.bodies.get(line.strip(), ())]
        return bool(found) and any(body in _key(text) for body in found)


def _documents_of(docstrings: Iterable[Docstring]) -> Iterator[str]:
    """Large docstrings unchanged; small ones joined with their neighbours in the same class or module."""
    seen: set[bytes] = set()

    def joined(texts: list[str]) -> Iterator[str]:
        if sum(len(text.split()) for text in texts) >= SHORTEST_DOCUMENT_WORDS:
            yield "\n\n".join(texts)

    for _, members in itertools.groupby(docstrings, key=lambda docstring: docstring.group):
        small: list[str] = []
        words = 0
        for docstring in members:
            key = _key(docstring.text)
            if key in seen:
                continue
            seen.add(key)
            length = len(docstring.text.split())
            if length >= SMALL_DOCUMENT_WORDS:
                yield docstring.text
                continue
            small.append(docstring.text)
            words += length
            if words >= JOINED_DOCUMENT_WORDS:
                yield from joined(small)
                small, words = [], 0
        yield from joined(small)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def write_documentation(documentation: Documentation, folder: Path) -> None:
    """Write documents.jsonl, pairs.jsonl and the held-out pairs as the BEIR folder `held-out`.

    Documents and pairs are ordered by their hash, so that the first ones are a sample of all packages.
    """
    documents = sorted(documentation.documents, key=_digest)
    pairs = sorted(documentation.pairs, key=lambda pair: _digest(pair.body))
    corpus = sorted([*documentation.held_out, *documentation.distractors], key=lambda pair: pair.name)
    files: dict[str, Iterable[Mapping[str, Any]]] = {
        "documents.jsonl": ({"text": text} for text in documents),
        "pairs.jsonl": ({"name": pair.name, "query": pair.summary, "positive": pair.body} for pair in pairs),
        "held-out/corpus.jsonl": ({"_id": pair.name, "title": "", "text": pair.body} for pair in corpus),
        "held-out/queries.jsonl": ({"_id": pair.name, "text": pair.summary} for pair in documentation.held_out),
    }
    for name, rows in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    qrels = folder / "held-out" / "qrels" / "test.tsv"
    qrels.parent.mkdir(exist_ok=True)
    lines = [f"{pair.name}\t{pair.name}\t1\n" for pair in documentation.held_out]
    qrels.write_text("query-id\tcorpus-id\tscore\n" + "".join(lines), encoding="utf-8")
