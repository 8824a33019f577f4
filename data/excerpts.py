"""Command: documents cut into excerpts of one to eight sentences, lengths that embedding models usually get.

    python -m data.excerpts FILE... --without TSV... --output texts.jsonl

FILE: as for `data.prepare documents`. TSV: sentences between tabs, as in STS files; these sentences are left out, so
that a test's sentences are not trained on. Each distinct excerpt is one line {"text": …}. The lines are ordered by
hash, so the first ones are a sample of all documents. A hash of the first sentence decides how many sentences an
excerpt has, so the same document gives the same excerpts whatever the other inputs are.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import cast

from data.corpora.options import SourceOptions
from data.corpora.plan import plan_documents
from data.corpora.read import read_split
from data.corpora.splits import Document
from data.ground.command import run_command
from data.ground.errors import ConfigError, DataError
from data.ground.files import read_text, write_atomically
from data.ground.options import Parser
from data.ground.whole_folder import check_file

_END = re.compile(r"(?<=[.!?])\s+|\n+")
_LEAST_CHARACTERS = 16  # of a sentence: shorter ones are headings, numbers or list marks
_MOST_CHARACTERS = 1600
# (share of excerpts, their largest number of sentences), cumulative.
_SENTENCES = ((0.6, 1), (0.8, 2), (0.95, 4), (1.0, 8))


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(
        prog="python -m data.excerpts", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("documents", nargs="+", metavar="FILE", help="documents, as for data.prepare documents")
    parser.add_argument("--without", nargs="+", default=[], type=Path, metavar="TSV", help="sentences to leave out")
    parser.add_argument("--output", required=True, type=Path, metavar="JSONL", help="the file to write")
    args = parser.parse_args(argv)
    check_file(args.output, "--output")
    if args.output.exists() and not args.output.is_file():
        raise ConfigError(f"--output {args.output} is no regular file; name another")
    for path in (*args.documents, *args.without):
        if args.output.exists() and Path(path).exists() and args.output.samefile(path):
            raise ConfigError(f"--output {args.output} is the input {path}, too; name another file")
    left_out = {plain(part) for path in args.without for part in re.split(r"[\t\n]", read_text(path, what="sentences"))}
    found = excerpts(_texts_of(args.documents), left_out)
    if not found:
        raise DataError(f"{', '.join(args.documents)} hold no sentence of {_LEAST_CHARACTERS} characters; give others")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(args.output, "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in found))
    sys.stdout.write(f"{len(found):,} excerpts, {sum(map(len, found)) / 1e6:.1f} M characters, in {args.output}\n")


def excerpts(documents: Iterable[str], left_out: set[str]) -> list[str]:
    """Distinct excerpts of all documents, ordered by hash. left_out: sentences as `plain` writes them."""
    found = {text for document in documents for text in _excerpts_of(sentences_of(document, left_out))}
    return sorted(found, key=_digest)


def sentences_of(document: str, left_out: set[str]) -> list[str]:
    parts = (" ".join(part.split()) for part in _END.split(document))
    return [part for part in parts if len(part) >= _LEAST_CHARACTERS and plain(part) not in left_out]


def plain(text: str) -> str:
    """A sentence for comparison: in lower case, with single spaces."""
    return " ".join(text.split()).lower()


def _excerpts_of(sentences: Sequence[str]) -> Iterator[str]:
    first = 0
    while first < len(sentences):
        draw = int.from_bytes(_digest(sentences[first])[:6]) / 2**48
        count = next(count for share, count in _SENTENCES if draw < share)
        yield " ".join(sentences[first : first + count])[:_MOST_CHARACTERS]
        first += count


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "replace")).digest()


def _texts_of(inputs: Sequence[str]) -> Iterator[str]:
    for input_split in plan_documents(inputs, source=SourceOptions(skip_empty=True)):
        yield from (cast(Document, record)["text"] for _, record in read_split(input_split))


if __name__ == "__main__":
    run_command(main)
