"""The record's texts: sentences, windows of 2 to 8 sentences, premises and hypotheses, and short translated sentences.

    python texts.py --text CORPUS.jsonl.gz... --nli TRIPLETS.tsv... --pairs PAIRS.tsv --leave-out STS.tsv... > FILE

CORPUS: one {"text": ...} a line. TRIPLETS: tab-separated texts with a header. PAIRS: tab-separated with a header, the
English sentence third. STS: score, sentence, sentence; no text of the output holds one of these sentences on its own.
Equal texts are written once, case aside. The order, and which windows are kept, follow from a seed.
"""

from __future__ import annotations

import argparse
import collections
import csv
import gzip
import json
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path

SENTENCE_ENDS = re.compile(r"(?<=[.!?])\s+|\n+")
SHARE_OF_WINDOWS = 0.55


def normalised(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


def of_nli(path: Path) -> Iterator[tuple[str, str]]:
    with path.open(encoding="utf8") as file:
        rows = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        next(rows)
        for row in rows:
            yield from (("nli", text) for text in row)


def of_pairs(path: Path) -> Iterator[tuple[str, str]]:
    with path.open(encoding="utf8") as file:
        next(file)
        for line in file:
            yield "pairs", line.rstrip("\n").split("\t")[2]


def of_corpus(path: Path, left_out: set[str], draws: random.Random) -> Iterator[tuple[str, str]]:
    with gzip.open(path, "rt", encoding="utf8") as file:
        for line in file:
            pieces = SENTENCE_ENDS.split(json.loads(line)["text"])
            sentences = [each for each in pieces if len(each) > 15 and normalised(each).lower() not in left_out]
            yield from (("sentence", each[:600]) for each in sentences)
            start = 0
            while start < len(sentences):
                length = draws.choice((2, 3, 4, 6, 8))
                if draws.random() < SHARE_OF_WINDOWS:
                    yield "window", " ".join(sentences[start : start + length])[:1600]
                start += length


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, nargs="+", required=True)
    parser.add_argument("--nli", type=Path, nargs="+", required=True)
    parser.add_argument("--pairs", type=Path, required=True)
    parser.add_argument("--leave-out", type=Path, nargs="+", required=True)
    args = parser.parse_args()
    left_out: set[str] = set()
    for path in args.leave_out:
        for line in path.read_text(encoding="utf8").splitlines():
            left_out.update(normalised(each).lower() for each in line.split("\t")[1:])
    draws = random.Random(0)

    def sources() -> Iterator[tuple[str, str]]:
        for path in sorted(args.nli):
            yield from of_nli(path)
        yield from of_pairs(args.pairs)
        for path in sorted(args.text):
            yield from of_corpus(path, left_out, draws)

    kept: dict[str, tuple[str, str]] = {}
    for source, text in sources():
        text = normalised(text)
        if len(text) >= 12 and text.lower() not in left_out:
            kept.setdefault(text.lower(), (source, text))
    texts = list(kept.values())
    draws.shuffle(texts)
    for _, text in texts:
        sys.stdout.write(json.dumps({"text": text}) + "\n")
    sys.stderr.write(f"{len(texts)} texts: {dict(collections.Counter(source for source, _ in texts))}\n")


if __name__ == "__main__":
    main()
