"""Retrieval: data sets, exact search, rankings and their scores, as trec_eval computes them.

trec_eval's behaviour is kept throughout, because published numbers depend on it:
- A ranking is ordered by score, and equal scores by document id DESCENDING (by bytes); a run file's rank column and
  line order are ignored. Scores are compared in single precision.
- nDCG's gains are the judged grades whatever `relevance_level`; unjudged documents and negative grades gain nothing.
- Queries without judgements are skipped. Judged queries that the run lacks are skipped by trec_eval
  (`complete=False` here) and count 0 with its option `-c` (`complete=True`). Our own evaluations are complete; the
  scoring of a run file is complete only on request. Judged queries without a relevant document count 0 in both.
The arithmetic is trec_eval's own C code, through `pytrec_eval`. `recip_rank_10` is `recip_rank` of rankings cut at ten
(trec_eval's -M 10), MS MARCO's MRR@10.

Search is exact: blocked matrix products with a running top k, so that memory is bounded by the block, not the corpus.
The code that makes a block decides where its vectors come from: encoded now, read from a store, or only this rank's
share.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from data.ground.errors import ConfigError
from models.sizes import ModelError, Size
from trainer.distributed import World
from trainer.evaluation.encoding.across import Searched, sides
from trainer.evaluation.encoding.encode import EncodeTexts
from trainer.evaluation.tasks.inputs import id_of, json_lines, text_lines, text_of, whole_number

log = logging.getLogger(__name__)

Qrels = Mapping[str, Mapping[str, int]]
Run = Mapping[str, Mapping[str, float]]

Block = tuple[int, Callable[[Size], Tensor]]
"""The position of a block's first document, and size -> its documents' vectors, float32 [m, size.dim]."""

MergeKeys = Callable[[Tensor, int], Tensor]
"""(this rank's best keys [queries, ≤ k], k) to all ranks' best on rank 0; every rank calls it."""

METRICS = ("ndcg_cut_10", "recip_rank", "recip_rank_10", "map", "recall_100", "recall_1000")
NOT_A_NUMBER = "a score is not a number: the model's embeddings hold NaN or infinity; evaluate another checkpoint"
DEFAULT_TOP_K = 1_000
DEFAULT_PASSAGES_PER_BLOCK = 50_000
_MAX_SCORES_PER_BLOCK = 1 << 22
_LARGEST_GRADE = 1_000_000  # trec_eval allocates a table as long as the largest grade
_LARGEST_SCORE = float(np.finfo(np.float32).max)
# The names that the last column has in a header.
_GRADE_NAMES = ("score", "relevance", "rel", "grade", "label", "rating", "judgement", "judgment")


# Data sets


@dataclass(frozen=True)
class RetrievalData:
    """A collection in memory; documents are sorted by id descending, the order in which ties are broken."""

    name: str
    document_ids: tuple[str, ...]
    documents: tuple[str, ...]
    query_ids: tuple[str, ...]
    queries: tuple[str, ...]
    qrels: Qrels


def retrieval_data(
    name: str, documents: Mapping[str, str], queries: Mapping[str, str], qrels: Qrels, *, max_documents: int = 0
) -> RetrievalData:
    """A collection with its documents in order and only its judged queries.

    `max_documents` > 0 keeps every judged document and as many others as fit, for quick looks during training; scores
    on such a part are higher than on the whole corpus.
    """
    if not documents or not queries:
        raise ConfigError(f"retrieval set {name!r} has no {'documents' if not documents else 'queries'}; add some")
    if unknown := next((query for query in qrels if query not in queries), None):
        raise ConfigError(
            f"the judgements of {name!r} name the query {unknown!r}, which it lacks; add it or remove them"
        )
    judged = {document for judgements in qrels.values() for document in judgements}
    if not judged & documents.keys():
        raise ConfigError(f"no document of {name!r} is judged; give the judgements that belong to this corpus")
    if missing := len(judged - documents.keys()):
        log.warning("%s: %d judged documents are not in the corpus and cannot be found", name, missing)
    kept = list(documents)
    if 0 < max_documents < len(kept):
        rest = [document for document in kept if document not in judged]
        kept = [document for document in kept if document in judged]
        # The others are evenly spaced, so that the choice depends only on the corpus.
        room = max(0, max_documents - len(kept))
        kept += [rest[i * len(rest) // room] for i in range(room)]
    kept.sort(key=str.encode, reverse=True)
    query_ids = tuple(query for query in queries if query in qrels)
    return RetrievalData(
        name,
        tuple(kept),
        tuple(documents[document] for document in kept),
        query_ids,
        tuple(queries[query] for query in query_ids),
        qrels,
    )


def load_beir(
    folder: str | Path, *, split: str = "test", name: str | None = None, max_documents: int = 0
) -> RetrievalData:
    """Read a BEIR folder: corpus.jsonl, queries.jsonl, qrels/<split>.tsv. A document is title, space, text."""
    folder = Path(folder)
    name = name or folder.name or folder.resolve().name
    if Path(split).name != split:
        raise ConfigError(f"--split {split!r} is no name of a split; give one such as test")
    for needed in ("corpus.jsonl", "queries.jsonl", f"qrels/{split}.tsv"):
        if not (folder / needed).is_file():
            raise ConfigError(f"{folder} lacks {needed}; give a BEIR folder and a split that it has")
    documents = _texts_by_id(folder / "corpus.jsonl", "corpus", titled=True)
    queries = _texts_by_id(folder / "queries.jsonl", "queries")
    qrels = read_qrels(folder / "qrels" / f"{split}.tsv")
    return retrieval_data(name, documents, queries, qrels, max_documents=max_documents)


def _texts_by_id(path: Path, what: str, *, titled: bool = False) -> dict[str, str]:
    """Texts by id, with titles put before them. An id may be repeated only with the same text."""
    texts: dict[str, str] = {}
    for where, row in json_lines(path, what):
        key, text = id_of(row, "_id", where), text_of(row, "text", where)
        if titled:
            text = f"{text_of(row, 'title', where, optional=True)} {text}".strip()
        if texts.setdefault(key, text) != text:
            raise ConfigError(f"{where} gives the _id {key!r} again with another text; remove one of them")
    return texts


# TREC files


def read_qrels(path: str | Path) -> dict[str, dict[str, int]]:
    """Judgements, query -> document -> grade, from TREC's four columns or BEIR's three with a header."""
    path = Path(path)
    qrels: dict[str, dict[str, int]] = {}
    by_tabs = False
    for number, line in _lines(path, "judgements"):
        columns = [each.strip() for each in line.split("\t")] if by_tabs else line.split()
        if number == 1 and len(columns) == 3 and columns[2].lower() in _GRADE_NAMES:
            # BEIR's files are separated by tabs, because their ids may hold spaces.
            by_tabs = line.count("\t") == 2
            continue
        grade = whole_number(columns[-1], most=_LARGEST_GRADE)
        if len(columns) not in ((3,) if by_tabs else (3, 4)) or grade is None or not all(columns):
            raise ConfigError(
                f"{path} line {number} is not a judgement; it needs query, 0, document and a grade between "
                f"-{_LARGEST_GRADE} and {_LARGEST_GRADE}, or those but 0, below a header such as query-id corpus-id "
                "score"
            )
        query, document = columns[0], columns[-2]
        if document in qrels.setdefault(query, {}):
            raise ConfigError(
                f"{path} line {number} judges document {document!r} for query {query!r} again; remove one"
            )
        qrels[query][document] = grade
    if not qrels:
        raise ConfigError(f"{path} holds no judgements; give a qrels file")
    return qrels


def read_run(path: str | Path) -> dict[str, dict[str, float]]:
    """A run, query -> document -> score, from TREC's six columns; further columns are ignored."""
    path = Path(path)
    run: dict[str, dict[str, float]] = {}
    for number, line in _lines(path, "a run"):
        columns = line.split()
        try:
            query, _, document, _, score, *_ = columns
            value = float(score)
        except ValueError:
            value = math.nan
        # Scores are compared in single precision, where larger numbers would be infinite.
        if len(columns) < 6 or not abs(value) <= _LARGEST_SCORE:
            raise ConfigError(
                f"{path} line {number} is no line of a run; it needs query, Q0, document, rank, score, name"
            )
        if document in run.setdefault(query, {}):
            raise ConfigError(f"{path} line {number} ranks document {document!r} for query {query!r} again; remove one")
        run[query][document] = value
    if not run:
        raise ConfigError(f"{path} holds no ranking; give a run file")
    return run


def check_run_names(sets: Iterable[RetrievalData]) -> None:
    """Refuse ids that a run file cannot hold, before anything is searched."""
    for data in sets:
        for name in (*data.query_ids, *data.document_ids):
            if name.split() != [name]:
                raise ConfigError(f"{data.name} has the id {name!r}, and a run file's names cannot hold white space")


def write_run(run: Run, path: str | Path, *, name: str = "barista") -> None:
    """Write TREC's six columns. Scores keep all digits of single precision, so that reading gives the same ties."""
    with Path(path).open("w", encoding="utf-8", newline="\n") as lines:
        for query, scores in run.items():
            for rank, document in enumerate(ranking(scores), 1):
                if any(not part or part.split() != [part] for part in (query, document, name)):
                    raise ConfigError(f"{query!r} {document!r} {name!r}: a run file's names cannot hold white space")
                lines.write(f"{query} Q0 {document} {rank} {np.float32(scores[document])!s} {name}\n")


def _lines(path: Path, what: str) -> Iterator[tuple[int, str]]:
    if not path.is_file():
        raise ConfigError(f"file {path} does not exist; give a file with {what}")
    return ((number, line) for number, line in text_lines(path, "file") if line.strip())


# Scores of a ranking


@dataclass(frozen=True)
class RunScores:
    """Means over queries, and the values of every query, under trec_eval's names."""

    means: dict[str, float]
    per_query: dict[str, dict[str, float]] = field(repr=False)
    num_queries: int = 0

    def of_queries(self, metric: str) -> list[float]:
        """A metric of every query, in the order of `per_query`."""
        return [values[metric] for values in self.per_query.values()]


def ranking(scores: Mapping[str, float], depth: int | None = None) -> list[str]:
    """Documents as trec_eval ranks them: by score descending in single precision, then by id descending in bytes."""
    single = dict(zip(scores, np.fromiter(scores.values(), np.float32, len(scores)).tolist()))
    if depth is not None and 0 < depth < len(single):
        # Otherwise sorting a thousand documents to keep ten takes most of the time of scoring a large run.
        worst = sorted(single.values(), reverse=True)[depth - 1]
        single = {document: score for document, score in single.items() if score >= worst}
    return sorted(single, key=lambda document: (single[document], document.encode()), reverse=True)[:depth]


def cut_run(run: Run, depth: int) -> dict[str, dict[str, float]]:
    """The first `depth` documents of every ranking."""
    return {query: {doc: scores[doc] for doc in ranking(scores, depth)} for query, scores in run.items()}


def score_run(
    run: Run, qrels: Qrels, *, relevance_level: int = 1, complete: bool = True, max_documents: int | None = None
) -> RunScores:
    """`METRICS` of a run. Grades of at least `relevance_level` are relevant (nDCG uses the grades themselves).

    `complete`: judged queries that the run lacks count 0 (trec_eval -c); else they are left out of the means.
    `max_documents`: rankings are cut to so many documents first (trec_eval -M).
    """
    import pytrec_eval

    if relevance_level < 1:
        raise ConfigError(f"relevance level {relevance_level} is below 1, the lowest grade that can be relevant")
    run = {query: scores for query, scores in run.items() if query in qrels}
    if max_documents is not None:
        run = cut_run(run, max_documents)
    judgements = {query: dict(grades) for query, grades in qrels.items()}
    evaluator = pytrec_eval.RelevanceEvaluator(
        judgements, {"ndcg_cut.10", "recip_rank", "map", "recall.100,1000"}, relevance_level=relevance_level
    )
    per_query = evaluator.evaluate(run)
    cut = pytrec_eval.RelevanceEvaluator(judgements, {"recip_rank"}, relevance_level=relevance_level)
    for query, values in cut.evaluate(cut_run(run, 10)).items():
        per_query[query]["recip_rank_10"] = values["recip_rank"]
    if complete:
        for query in qrels:
            per_query.setdefault(query, dict.fromkeys(METRICS, 0.0))
    if not per_query:
        raise ConfigError("no query of the run is judged; give the run and the judgements of one set of queries")
    # Queries are put in trec_eval's order, so that sums round as in trec_eval.
    per_query = {query: {name: per_query[query][name] for name in METRICS} for query in sorted(per_query)}
    means = {name: sum(values[name] for values in per_query.values()) / len(per_query) for name in METRICS}
    return RunScores(means, per_query, len(per_query))


# Search


class TopK:
    """The best `k` documents of every query so far. Documents are added in blocks; their positions break ties.

    A score and its document's position make one int64 key: the score in the high bits, the reversed position in the low
    bits. So `torch.topk` on keys meets no ties: equal scores go to the document of the lower position, whatever the
    order of the blocks.
    """

    def __init__(self, num_queries: int, k: int, *, device: torch.device | str = "cpu") -> None:
        self.k = k
        self.keys = torch.empty((num_queries, 0), dtype=torch.int64, device=device)

    def add_block(
        self, queries: Tensor, documents: Tensor, *, start: int, max_scores: int = _MAX_SCORES_PER_BLOCK
    ) -> None:
        """Score `documents` [m, dim], the first of which has the position `start`, against all `queries` [n, dim].

        At most about `max_scores` scores are in memory at a time.
        """
        rows = max(1, min(len(queries), max_scores // max(1, min(len(documents), 16_384))))
        columns = max(1, max_scores // rows)
        for left in range(0, len(documents), columns):
            block = documents[left : left + columns].to(self.keys.device)
            tops = range(0, len(queries), rows)
            self.keys = torch.cat(
                [self._merged(queries[top : top + rows] @ block.T, top, start + left) for top in tops]
            )

    def _merged(self, scores: Tensor, top: int, start: int) -> Tensor:
        """Best keys of the queries from `top` on, with their scores [rows, m] for m documents from `start` on added."""
        held = self.keys[top : top + len(scores)]
        keys = self._entering(held, scores, start)
        if keys is None:
            keys = self._best(scores, start)
        keys = torch.cat([held, keys], dim=1)
        return torch.topk(keys, min(self.k, keys.shape[1]), dim=1).values

    def _best(self, scores: Tensor, start: int) -> Tensor:
        """Keys of each row's k best scores; of all scores if there are at most k, or if a tie straddles the cut."""
        positions = torch.arange(start, start + scores.shape[1], device=scores.device)
        if scores.shape[1] <= self.k:
            _refuse_nan(scores)
            return _sort_keys(scores, positions)
        # Choosing among floats first is several times faster. The one extra score shows a tie at the cut, and topk puts
        # NaN first, so a NaN shows too.
        best, places = torch.topk(scores, self.k + 1, dim=1)
        _refuse_nan(best)
        if (best[:, -2] == best[:, -1]).any():
            return _sort_keys(scores, positions)
        return _sort_keys(best[:, :-1], positions[places[:, :-1]])

    def _entering(self, held: Tensor, scores: Tensor, start: int) -> Tensor | None:
        """The keys of the scores that may enter the best k, int64 [rows, c]: at or above the row's worst held score.

        One pass over the scores [rows, m] finds them, and they become fewer from block to block. The result is None if
        fewer than k are held so far, or if more than k of a row would enter: the general method is then better.
        """
        if held.shape[1] < self.k or scores.shape[1] <= self.k:
            return None
        rows, columns = (~(scores < _scores_of(held[:, -1:]))).nonzero(as_tuple=True)  # also finds NaN
        counts = torch.bincount(rows, minlength=len(scores))
        if (most := int(counts.max())) > self.k:
            return None
        found = scores[rows, columns]
        _refuse_nan(found)
        keys = held.new_full((len(scores), most), torch.iinfo(torch.int64).min)
        firsts = counts.cumsum(0) - counts
        keys[rows, torch.arange(len(rows), device=rows.device) - firsts[rows]] = _sort_keys(found, columns + start)
        return keys

    def result(self) -> tuple[np.ndarray, np.ndarray]:
        """Scores float32 and document positions int64, both [queries, min(k, documents)], best first."""
        positions = 0xFFFFFFFF - (self.keys & 0xFFFFFFFF)
        return _scores_of(self.keys).cpu().numpy(), positions.cpu().numpy()


def _refuse_nan(scores: Tensor) -> None:
    if torch.isnan(scores).any():
        raise ModelError(NOT_A_NUMBER)


def _sort_keys(scores: Tensor, positions: Tensor) -> Tensor:
    """int64 keys that order by score ascending, then by position descending. `positions` broadcasts to the scores."""
    # The two zeros compare equal and must have one key; adding 0.0 turns -0.0 into 0.0.
    bits = (scores.float() + 0.0).view(torch.int32)
    # The bits of negative floats, as integers, order the wrong way round; flipping all but the sign bit corrects it.
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    return (ordered << 32) | (0xFFFFFFFF - positions)


def _scores_of(keys: Tensor) -> Tensor:
    """The float32 scores in keys of `_sort_keys`."""
    ordered = (keys >> 32).to(torch.int32)
    return torch.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).view(torch.float32)


def search(
    queries: np.ndarray,
    documents: np.ndarray,
    *,
    top_k: int,
    device: torch.device | str = "cpu",
    max_scores: int = _MAX_SCORES_PER_BLOCK,
) -> tuple[np.ndarray, np.ndarray]:
    """Exact dot-product search: scores and positions [n, min(top_k, m)] of queries [n, dim] in documents [m, dim].

    Equal scores go to the earlier document: pass documents in id-descending order for trec_eval's ranking.
    """
    found = TopK(len(queries), top_k, device=device)
    found.add_block(
        torch.from_numpy(queries).to(device),
        torch.from_numpy(np.ascontiguousarray(documents)),
        start=0,
        max_scores=max_scores,
    )
    return found.result()


def in_blocks(encode_documents: EncodeTexts, documents: Sequence[str], rows: int) -> Iterator[Block]:
    """A corpus encoded `rows` documents at a time; a block's vectors are dropped with the block."""

    def vectors_of(block: Mapping[Size, np.ndarray], size: Size) -> Tensor:
        return torch.from_numpy(block[size])

    for start in range(0, len(documents), rows):
        yield start, partial(vectors_of, encode_documents(documents[start : start + rows]))


@dataclass(frozen=True)
class SearchOptions:
    """How a corpus is searched."""

    top_k: int = DEFAULT_TOP_K
    """Documents kept for every query."""
    ignore_identical_ids: bool = False
    """Drop the document that has the query's own id, see `without_own_document`."""
    merge: MergeKeys | None = None
    """Brings the best keys of all ranks to rank 0, where each rank searches blocks of its own."""

    @property
    def depth(self) -> int:
        """Documents searched for: one more where one may be dropped."""
        return self.top_k + self.ignore_identical_ids

    def kept(self, run: Run) -> Run:
        """What is scored of a run of `depth` documents for each query."""
        return cut_run(without_own_document(run), self.top_k) if self.ignore_identical_ids else run


DEFAULT_SEARCH = SearchOptions()


def retrieve(
    encode_queries: EncodeTexts,
    blocks: Iterable[Block],
    data: RetrievalData,
    *,
    searched: Sequence[Searched] | None = None,
    options: SearchOptions = DEFAULT_SEARCH,
    world: World,
) -> Iterator[tuple[Searched, dict[str, dict[str, float]]]]:
    """For each size, the run of all judged queries; one pass over the corpus, in blocks, serves all sizes.

    `searched`: the sizes, or pairs of sizes, to score; default: all sizes that `encode_queries` gives.
    Memory: one block's vectors at every size, and `options.depth` keys per query and size. Every rank must call this;
    only rank 0 yields. Without `options.merge`, all ranks pass the same blocks, encode them together, and rank 0
    searches them. With it, each rank passes and searches blocks of its own, and `merge` brings the best keys to rank 0.
    """
    merge, depth, device = options.merge, options.depth, world.device
    query_vectors = encode_queries(data.queries)
    searches = world.is_main or merge is not None
    on_device = {size: torch.from_numpy(rows).to(device) for size, rows in query_vectors.items() if searches}
    wanted: list[Searched] = list(on_device) if searched is None or not searches else list(dict.fromkeys(searched))
    found = {each: TopK(len(data.queries), depth, device=device) for each in wanted}
    # Documents are cut to a size once, for all queries that search them at that size.
    by_documents: dict[Size, list[Searched]] = {}
    for each in wanted:
        by_documents.setdefault(sides(each).document, []).append(each)
    for start, vectors_of in blocks:
        for size, searching in by_documents.items():
            documents = vectors_of(size)
            for each in searching:
                found[each].add_block(on_device[sides(each).query], documents, start=start)
    for each in list(found):
        best = found.pop(each)
        if merge is not None:
            best.keys = merge(best.keys, min(depth, len(data.documents)))
        if world.is_main:
            yield each, as_run(data, *best.result())


def as_run(data: RetrievalData, scores: np.ndarray, positions: np.ndarray) -> dict[str, dict[str, float]]:
    """The results of a search, `scores` and `positions` [queries, k], as a run."""
    run = {}
    for query, row, places in zip(data.query_ids, scores.tolist(), positions.tolist()):
        run[query] = {data.document_ids[place]: score for score, place in zip(row, places)}
    return run


def without_own_document(run: Run) -> dict[str, dict[str, float]]:
    """Drop the document that has the query's own id: in ArguAna and Quora, queries are documents of the corpus."""
    return {query: {doc: score for doc, score in scores.items() if doc != query} for query, scores in run.items()}


def bm25_run(
    data: RetrievalData, *, top_k: int = DEFAULT_TOP_K, k1: float = 1.5, b: float = 0.75
) -> dict[str, dict[str, float]]:
    """BM25 (Lucene's variant, English stop words, no stemming) over the same documents and queries.

    Only documents that share a word with the query are retrieved, as in a search engine.
    """
    try:
        import bm25s
    except ImportError:
        raise ConfigError("the BM25 baseline needs the package bm25s; install it with: pip install bm25s") from None

    tokens = bm25s.tokenize(list(data.documents), stopwords="en", return_ids=False, show_progress=False)
    index = bm25s.BM25(k1=k1, b=b, method="lucene")
    if any(tokens):
        index.index(tokens, show_progress=False)
    queries = bm25s.tokenize(list(data.queries), stopwords="en", return_ids=False, show_progress=False)
    run = {}
    for query, words in zip(data.query_ids, queries):
        known = [word for word in words if word in index.vocab_dict] if any(tokens) else []
        scores = index.get_scores(known) if known else np.zeros(len(data.documents), np.float32)
        places = np.flatnonzero(scores > 0)
        best = places[np.lexsort((places, -scores[places]))[:top_k]]
        run[query] = {data.document_ids[place]: float(scores[place]) for place in best}
    return run


def evaluate_retrieval(
    encode_queries: EncodeTexts,
    blocks: Iterable[Block],
    data: RetrievalData,
    *,
    searched: Sequence[Searched] | None = None,
    options: SearchOptions = DEFAULT_SEARCH,
    world: World,
    on_run: Callable[[Searched, Run], None] | None = None,
) -> dict[Searched, RunScores]:
    """Size -> scores over all judged queries; empty on ranks other than rank 0. Other arguments: see `retrieve`.

    `on_run` is called with every run, for example to write it to a file; only one run is in memory at a time.
    """
    results = {}
    for size, found in retrieve(encode_queries, blocks, data, searched=searched, options=options, world=world):
        run = options.kept(found)
        if on_run is not None:
            on_run(size, run)
        results[size] = score_run(run, data.qrels)
    return results
