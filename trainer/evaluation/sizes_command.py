"""The command `sizes`: every task at every size, as records, raw results, tables and figures.

It runs in one process or on the ranks of a launcher, and is one evaluation either way. Partial results are kept until
the evaluation is complete: vectors block by block in the folder of --vectors, tasks one by one beside --output. So
after a kill the same command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from data.ground.errors import ConfigError
from data.ground.files import file_name
from data.ground.records import digest_of
from data.ground.whole_folder import check_place
from data.tokens import tokenizer_fingerprint
from models.encoder import Encoder
from models.settings import EmbeddingSettings
from models.sizes import Size
from trainer.distributed import World, gather_objects, join
from trainer.evaluation.arguments import require_tasks
from trainer.evaluation.encoding.across import Searched, across_depths, encoded_sizes
from trainer.evaluation.encoding.encode import Embedder, encode, encoder_forward
from trainer.evaluation.results.comparison import across_verdicts, check_same_items, verdicts_of
from trainer.evaluation.results.output import output_folder, results_content, write_json, write_text
from trainer.evaluation.results.parts import PARTS_FOLDER, Parts, Results
from trainer.evaluation.results.raw import BM25, RAW_FILE, RawResults, read_raw, write_raw
from trainer.evaluation.results.report import (
    Record,
    grids_markdown,
    grids_of,
    plot_grids,
    plot_records,
    results_markdown,
)
from trainer.evaluation.run import Outputs, evaluate_tasks, known_metrics
from trainer.evaluation.search.vectors import VectorStore, open_store, read_store, texts_digest, weights_digest, widest
from trainer.evaluation.subject import choose_device, load_subject, untrained_encoder
from trainer.evaluation.tasks.corpus import Progress, counted, encoded_blocks, merge_keys, stored_blocks, watched
from trainer.evaluation.tasks.read import read_tasks
from trainer.evaluation.tasks.retrieval import (
    DEFAULT_SEARCH,
    Block,
    MergeKeys,
    RetrievalData,
    Run,
    SearchOptions,
    bm25_run,
    check_run_names,
    score_run,
    write_run,
)
from trainer.evaluation.tasks.sts import STSTask
from trainer.resilience.stopping import STOP_FILE_VARIABLE, Stopped, StopRequests

log = logging.getLogger(__name__)

# A kill loses at most one block of the store per rank, so blocks are small; longer ones would hardly save padding.
_STORED_ROWS_PER_BLOCK = 8_192


def evaluate_sizes(args: argparse.Namespace) -> int:
    for chatty in ("bm25s", "huggingface_hub"):
        logging.getLogger(chatty).setLevel(logging.ERROR)
    require_tasks(args)
    device = choose_device(args.device)
    main_rank = os.environ.get("RANK", "0") == "0"
    output = output_folder(args.output) if main_rank else None
    # Files are read before the model, so that a wrong path fails at once.
    sts, beir = read_tasks(
        args.sts, args.beir, split=args.split, subsets=args.sts_subsets, max_documents=args.max_documents
    )
    if args.save_runs:
        check_run_names(beir)
    if args.vectors:
        check_place(args.vectors, "--vectors", link=True)
    against = read_raw(args.against / RAW_FILE) if args.against else None
    if against is not None:
        check_same_items(against, sts, beir, name=str(args.against))

    encoder, tokenizer, settings, sizes = load_subject(args)
    searched: list[Searched] = [*sizes, *(across_depths(sizes) if args.across_depths else ())]
    methods = {"trained": encoder}
    if args.random_init:
        methods["untrained"] = untrained_encoder(encoder, seed=args.seed)
    world = _join_ranks(device)
    parts = Parts(output / PARTS_FOLDER if output else None)
    finished: list[Results] = []
    with StopRequests(stop_file=os.environ.get(STOP_FILE_VARIABLE)) as stops:
        try:
            for method, model in methods.items():
                log.info("%s: %d sizes on %d tasks", method, len(sizes), len(sts) + len(beir))
                model.to(world.device).eval()
                subject = _Subject(args, method, model, tokenizer, settings, searched, world, stops.wanted)
                finished += subject.evaluate(sts, beir, parts, output)
            if not main_rank:
                return 0
            if args.bm25:
                for data in beir:
                    finished.append(_bm25_part(data, parts, _search_options(args), wanted=stops.wanted))
        except Stopped as stopped:
            kept = " and ".join(name for name, given in (("--output", output), ("--vectors", args.vectors)) if given)
            goes_on = f"; the same command goes on with what {kept} kept" if kept else ""
            raise Stopped(f"stopped ({stopped}){goes_on}") from None

    _report(args, sizes, settings, finished, against, output)
    parts.remove()
    return 0


def _report(
    args: argparse.Namespace,
    sizes: Sequence[Size],
    settings: EmbeddingSettings,
    finished: Sequence[Results],
    against: RawResults | None,
    output: Path | None,
) -> None:
    """Print the tables of all results, with their significance, and write what --json and --output ask for."""
    found = [record for of_part, _ in finished for record in of_part]
    records = [record for record in found if not record.document_layers]
    across = [record for record in found if record.document_layers]
    raw = RawResults()
    for _, of_part in finished:
        raw.add(of_part)
    verdicts = verdicts_of(raw, against=against, name=str(args.against), corrected=args.holm)
    grids, of_grids = grids_of(records, across), across_verdicts(raw, corrected=args.holm)
    table = "\n".join(filter(None, (results_markdown(records, verdicts), grids_markdown(grids, of_grids))))
    sys.stdout.write(table)
    content = results_content(args.model, sizes, settings, records, verdicts)
    if across:
        content["across_depths"] = {
            "records": [record.as_json() for record in across],
            "significance": [verdict.as_json() for verdict in of_grids],
        }
    if args.json:
        write_json(args.json, content)
    if output:
        write_text(output / "table.md", table)
        plot_records(records, output / "figures")
        plot_grids(grids, output / "figures")
        write_raw(raw, output / RAW_FILE)
        write_json(output / "results.json", content)


@dataclass(frozen=True)
class _Subject:
    """One method's model, with everything that decides its results."""

    args: argparse.Namespace
    method: str
    model: Encoder
    tokenizer: PreTrainedTokenizerFast
    settings: EmbeddingSettings
    searched: Sequence[Searched]
    world: World
    wanted: Callable[[], str | None]  # the reason why this process should stop, if there is one

    @property
    def sizes(self) -> list[Size]:
        return encoded_sizes(self.searched)

    def evaluate(
        self, sts: Sequence[STSTask], beir: Sequence[RetrievalData], parts: Parts, output: Path | None
    ) -> list[Results]:
        """The results, one entry per task in the order given. Every rank must call it; only rank 0 gets them."""
        world = self.world
        run = partial(
            evaluate_tasks,
            self._embedder,
            self.searched,
            self.settings,
            search=_search_options(self.args, merge=partial(merge_keys, world=world) if world.size > 1 else None),
            blocks_of=self._blocks_of,
        )
        outputs = Outputs(self.method, _run_writer(output, self.method) if self.args.save_runs and output else None)
        tasks: list[STSTask | RetrievalData] = [*sts, *beir]
        keys = {task.name: self._decided_by(task) for task in tasks} if parts.folder else {}
        found = {name: parts.load(self.method, name, key) for name, key in keys.items()}
        done = gather_objects([name for name, part in found.items() if part is not None])[0]
        results = {name: part for name, part in found.items() if part is not None}

        def keep(name: str, records: list[Record], raw: RawResults) -> None:
            results[name] = records, raw
            parts.save(self.method, name, keys.get(name, {}), records, raw)

        # The pairs of all STS files are encoded in one pass, because they are few.
        if pairs := [task for task in sts if task.name not in done]:
            raw = RawResults()
            records = run(sts=pairs, outputs=dataclasses.replace(outputs, raw=raw))
            for task in pairs:
                keep(task.name, [record for record in records if record.task == task.name], raw.of_task(task.name))
        for data in beir:
            if data.name not in done:
                raw = RawResults()
                keep(data.name, run(retrieval=[data], outputs=dataclasses.replace(outputs, raw=raw)), raw)
        return [results[task.name] for task in tasks] if world.is_main else []

    @property
    def _embedder(self) -> Embedder:
        """The model at all sizes, on all ranks together."""
        forward = encoder_forward(self.model, self.sizes, dtype=getattr(torch, self.args.dtype))
        # A single process may stop in any pass. Among ranks, a rank must not leave a pass that all of them make.
        forward = watched(forward, self.wanted) if self.world.size == 1 else forward
        return Embedder(
            forward,
            self.tokenizer,
            self.sizes,
            self.world,
            flat=self.model.is_static,
            pool_prompt=self.model.pool_prompt,
            batch_tokens=self.args.batch_tokens,
            progress=sys.stderr.isatty(),
            rows=self.model.word_embeddings.num_embeddings,
        )

    def _embedder_of_blocks(self, sizes: Sequence[Size], progress: Progress) -> Embedder:
        """The model at `sizes`, on this rank alone."""
        flat = self.model.is_static
        forward = encoder_forward(self.model, sizes, dtype=getattr(torch, self.args.dtype))
        return Embedder(
            counted(watched(forward, self.wanted), progress, flat=flat),
            self.tokenizer,
            sizes,
            World.alone(self.world.device),
            flat=flat,
            pool_prompt=self.model.pool_prompt,
            batch_tokens=self.args.batch_tokens,
            rows=self.model.word_embeddings.num_embeddings,
        )

    def _blocks_of(self, data: RetrievalData) -> Iterable[Block]:
        args, settings, world = self.args, self.settings, self.world
        share = max(1, -(-len(data.documents) // world.size))
        rows = min(args.passages_per_block, share)
        store = None
        if args.vectors:
            store = self._store(data, rows_per_block=min(rows, _STORED_ROWS_PER_BLOCK))
        progress = Progress(data.name, shown=world.is_main)
        encode_whole = partial(
            encode,
            self._embedder_of_blocks(store.sizes if store else widest(self.sizes), progress),
            similarity="dot",  # vectors are normalised after the cut
            max_length=settings.passage_max_length,
            prompt=settings.passage_prompt,
        )
        if store:
            return stored_blocks(
                data.documents, encode_whole, store, similarity=settings.similarity, world=world, progress=progress
            )
        return encoded_blocks(
            data.documents,
            encode_whole,
            rows_per_block=rows,
            similarity=settings.similarity,
            world=world,
            progress=progress,
        )

    def _store(self, data: RetrievalData, *, rows_per_block: int) -> VectorStore:
        folder = self.args.vectors / f"{file_name(data.name)}_{self.method}"
        if self.world.is_main:
            settings = [self.settings.passage_max_length, self.settings.passage_prompt, self.args.dtype]
            store = open_store(
                folder,
                rows=len(data.documents),
                rows_per_block=rows_per_block,
                sizes=self.sizes,
                fingerprints={
                    "weights": self._weights,
                    "texts": texts_digest(data.documents),
                    "settings (tokenizer, length, prompt or --dtype)": digest_of([self._tokenizer, *settings]),
                },
            )
            megabytes = 2 * store.rows * sum(store.widths.values()) / 2**20
            log.info("%s: vectors of %s documents, %.0f MiB", folder, f"{store.rows:,}", megabytes)
        gather_objects(None)
        return read_store(folder)

    def _decided_by(self, task: STSTask | RetrievalData) -> dict[str, Any]:
        args = self.args
        names = ("top_k", "dtype", "ignore_identical_ids", "save_runs")
        return {
            "weights": self._weights,
            "tokenizer": self._tokenizer,
            "task": _task_digest(task),
            "sizes": [str(size) for size in self.searched],
            "settings": dataclasses.asdict(self.settings),
            "vectors": bool(args.vectors),
            **{name: getattr(args, name) for name in names},
        }

    @cached_property
    def _weights(self) -> str:
        return weights_digest(self.model)

    @cached_property
    def _tokenizer(self) -> str:
        return tokenizer_fingerprint(self.tokenizer)


def bm25_records(
    data: RetrievalData, *, options: SearchOptions = DEFAULT_SEARCH, raw: RawResults | None = None
) -> list[Record]:
    """BM25's scores on one collection."""
    scores = score_run(options.kept(bm25_run(data, top_k=options.depth)), data.qrels)
    means = known_metrics(scores, data, options.top_k)
    if raw is not None:
        raw.add_retrieval(BM25, data.name, (0, 0), scores, list(means))
    return [Record(BM25, data.name, "retrieval", "", 0, 0, metric, value) for metric, value in means.items()]


def _bm25_part(
    data: RetrievalData, parts: Parts, options: SearchOptions, *, wanted: Callable[[], str | None]
) -> Results:
    key: dict[str, Any] = {}
    if parts.folder:
        key = {"task": _task_digest(data), "top_k": options.top_k, "ignore_identical_ids": options.ignore_identical_ids}
    if (part := parts.load(BM25, data.name, key)) is not None:
        return part
    if reason := wanted():
        raise Stopped(reason)
    log.info("%s: %s", BM25, data.name)
    raw = RawResults()
    records = bm25_records(data, options=options, raw=raw)
    parts.save(BM25, data.name, key, records, raw)
    return records, raw


def _search_options(args: argparse.Namespace, *, merge: MergeKeys | None = None) -> SearchOptions:
    return SearchOptions(args.top_k, args.ignore_identical_ids, merge)


def _join_ranks(device: torch.device) -> World:
    """This process's place among the ranks of its launcher; one rank without a launcher."""
    world = join(device)
    if world.device.type != device.type:
        raise ConfigError("--device cpu under a launcher needs the GPUs hidden; set CUDA_VISIBLE_DEVICES to nothing")
    return world


def _task_digest(task: STSTask | RetrievalData) -> str:
    if isinstance(task, STSTask):
        return digest_of(dataclasses.asdict(task))
    ids_and_texts = (task.document_ids, task.documents, task.query_ids, task.queries)
    return digest_of([task.name, *map(texts_digest, ids_and_texts), task.qrels])


def _run_writer(output: Path, method: str) -> Callable[[str, Searched, Run], None]:
    def write(task: str, size: Searched, run: Run) -> None:
        folder = output / "runs"
        folder.mkdir(parents=True, exist_ok=True)
        write_run(run, folder / f"{file_name(task)}_{method}_{size}.trec", name=f"{method}_{size}")

    return write
