"""Command: text, pairs and tuples -> tokenized shards; also trains a tokenizer and collects installed documentation.

    python -m data.prepare {documents,tuples,tokenizer,installed-docs} --help

What is decided here:
- The inputs are cut into units (`data.corpora`); a process tokenizes a unit with the Rust tokenizer and writes it
  (`data.shards`). Only counts travel between processes.
- What is written depends on the inputs, the tokenizer, the options and the seed, never on the number of processes or on
  how often the command was killed. preparation.json records all of that in the output folder before the first shard:
  the same command goes on where it stopped, any other is refused.
- Inputs are told apart by the sha256 of all their bytes. `.inputs` keeps what each looked like when it was hashed
  (size, times, inode): it is hashed again only where that has changed, and a change while it is read is noticed.
- Samples are shuffled once, within blocks of a unit; epochs shuffle again while reading (`data.order`).
- Workers do not outlive the command: they are killed when it ends, and the kernel kills them when it is killed.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import functools
import hashlib
import json
import logging
import multiprocessing
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, cast

import numpy as np
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from data.command import INTERRUPTED_CODE, end_for, exit_code_of, log_to_stderr
from data.corpora import (
    MOST_NEGATIVES,
    TEXT_SPLITS,
    TUPLE_FORMATS,
    Document,
    IdLayout,
    TextIndex,
    TupleRecord,
    Unit,
    place,
    plan_documents,
    plan_tuples,
    read_unit,
)
from data.documentation import (
    DOCUMENTED_PACKAGES,
    STANDARD_LIBRARY,
    installed_documentation,
    without_interrupts,
    write_documentation,
)
from data.encoding import TextEncoder
from data.errors import CommandEnd, DataError, OtherFormat
from data.files import looks_of, read_text, reading, sha256_of, write_atomically
from data.inputs import PREPARATION, SCRATCH, check_name
from data.lines import LONGEST_LINE, Tally
from data.masking import draws, sample_keys
from data.order import check_seed
from data.parent_death import signal_at_parents_death
from data.shards import (
    CHUNK_SAMPLES,
    MANIFEST,
    SHARD_BYTES,
    Kind,
    ShardFolder,
    UnitWriter,
    finish_folder,
    finished_unit,
    token_dtype,
)
from data.tokens import LARGEST_ID, load_tokenizer, save_tokenizer, tokenizer_fingerprint, vocabulary_of

logger = logging.getLogger(__name__)

# What the inputs looked like when they were hashed.
SEEN = ".inputs"
# One call of the tokenizer: enough texts to amortise it, few enough that its result stays small.
BATCH_TEXTS = 1024
BATCH_CHARACTERS = 2**20
# Samples shuffled together, so that a unit of any size fits in memory.
BLOCK_TOKENS = 2**26
# Of preparation.json: 2 has the sha256 of whole inputs.
FORMAT = 2
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


@dataclass(frozen=True)
class Job:
    """What a process needs in order to write one unit."""

    number: int
    unit: Unit
    kind: Kind
    output: str
    tokenizer_file: str
    vocabulary_size: int
    graded: bool
    settings: dict[str, Any]
    seed: int
    shard_bytes: int
    chunk_samples: int
    query_prompt: str = ""
    passage_prompt: str = ""


@dataclass(frozen=True)
class Progress:
    """What was done since the last report."""

    source_bytes: int = 0
    text_bytes: int = 0
    samples: int = 0
    tokens: int = 0


Report = Callable[[Progress], None]


# ------------------------------------------------------------------------------------------------------- one unit


@functools.lru_cache(maxsize=1)
def _encoder(tokenizer_file: str, vocabulary_size: int) -> TextEncoder:
    """One a process, so that words met in one unit are known in the next."""
    from tokenizers import Tokenizer

    return TextEncoder(Tokenizer.from_file(tokenizer_file), token_dtype(vocabulary_size))


def write_unit(job: Job, report: Report) -> None:
    """Read, tokenize, shuffle and write one unit."""
    encode = _encoder(job.tokenizer_file, job.vocabulary_size)
    tally = Tally()
    block: list[tuple[list[np.ndarray], int, float | None]] = []  # texts, number of positives, score
    block_tokens = num_blocks = bytes_reported = 0
    with UnitWriter(
        job.output,
        job.number,
        kind=job.kind,
        vocabulary_size=job.vocabulary_size,
        graded=job.graded,
        source=job.unit.source,
        settings=job.settings,
        shard_bytes=job.shard_bytes,
        chunk_samples=job.chunk_samples,
    ) as writer:
        for batch in _batches(job, tally):
            texts = [text for sample in batch for text in sample.texts]
            ids = iter(encode(texts))
            batch_tokens = batch_samples = 0
            for sample in batch:
                found = [next(ids) for _ in sample.texts]
                kept = _without_empty(job, sample, found)
                if kept is not None:
                    block.append((*kept, sample.score))
                    batch_samples += 1
                    batch_tokens += sum(map(len, kept[0]))
            block_tokens += batch_tokens
            if block_tokens >= BLOCK_TOKENS:
                _write_block(job, writer, block, num_blocks)
                block, block_tokens, num_blocks = [], 0, num_blocks + 1
            text_bytes = sum(len(text.encode("utf-8", "replace")) for text in texts)
            report(Progress(tally.bytes_read - bytes_reported, text_bytes, batch_samples, batch_tokens))
            bytes_reported = tally.bytes_read
        _write_block(job, writer, block, num_blocks)


@dataclass(frozen=True)
class _Sample:
    texts: list[str]  # a document, or a query and its passages
    num_positives: int
    score: float | None
    position: int


def _batches(job: Job, tally: Tally) -> Iterator[list[_Sample]]:
    batch: list[_Sample] = []
    num_texts = characters = 0
    for position, record in read_unit(job.unit, tally):
        if job.kind == "documents":
            sample = _Sample([cast(Document, record)["text"]], 0, None, position)
        else:
            row = cast(TupleRecord, record)
            passages = [job.passage_prompt + text for text in (*row["positives"], *row["negatives"])]
            query = job.query_prompt + row["query"]
            sample = _Sample([query, *passages], len(row["positives"]), row["score"], position)
        batch.append(sample)
        num_texts += len(sample.texts)
        characters += sum(map(len, sample.texts))
        if num_texts >= BATCH_TEXTS or characters >= BATCH_CHARACTERS:
            yield batch
            batch, num_texts, characters = [], 0, 0
    if batch:
        yield batch


def _without_empty(job: Job, sample: _Sample, ids: list[np.ndarray]) -> tuple[list[np.ndarray], int] | None:
    """Texts of control characters and the like have characters but no tokens: they count as empty."""
    if all(map(len, ids)):
        return ids, sample.num_positives
    if not job.unit.skip_empty:
        raise DataError(
            f"{place(job.unit, sample.position)} holds a text without any token; "
            "fill it, or drop such texts with --skip-empty"
        )
    if job.kind == "documents" or not len(ids[0]):
        return None
    last_positive = 1 + sample.num_positives
    positives = [text for text in ids[1:last_positive] if len(text)]
    negatives = [text for text in ids[last_positive:] if len(text)]
    return ([ids[0], *positives, *negatives], len(positives)) if positives else None


def _write_block(
    job: Job, writer: UnitWriter, block: list[tuple[list[np.ndarray], int, float | None]], number: int
) -> None:
    key = sample_keys(job.seed, epochs=np.array([number]), sources=np.array([job.number]), samples=np.array([0]))
    for index in np.argsort(draws(key, np.arange(len(block))), kind="stable").tolist():
        texts, num_positives, score = block[index]
        if job.kind == "documents":
            writer.add_document(texts[0])
        else:
            writer.add_tuple(texts[0], texts[1:], num_positives=num_positives, score=score)


# -------------------------------------------------------------------------------------------------- several processes


def run_jobs(jobs: Sequence[Job], *, processes: int, report: Report) -> None:
    """Write all units; `report` is called here with every process's progress."""
    if processes < 1:
        raise DataError(f"{processes} processes cannot work; give 1 or more")
    # Rust threads beside several processes only get in each other's way.
    with _environment("TOKENIZERS_PARALLELISM", "false"):
        if min(processes, len(jobs)) <= 1:
            for job in jobs:
                write_unit(job, report)
                logger.info("unit %d finished: %s", job.number, job.unit.source)
        else:
            _run_in_processes(jobs, processes=min(processes, len(jobs)), report=report)


def _run_in_processes(jobs: Sequence[Job], *, processes: int, report: Report) -> None:
    context = multiprocessing.get_context("spawn")
    workers: list[SpawnProcess] = []
    connections: dict[Connection, Job | None] = {}
    waiting = list(reversed(jobs))
    try:
        for _ in range(processes):
            ours, theirs = context.Pipe()
            worker = context.Process(target=_work, args=(theirs, os.getpid()), daemon=True)
            with without_interrupts():
                worker.start()
            # With our copy of its end closed, a dead worker is seen as the end of the pipe, not as silence.
            theirs.close()
            workers.append(worker)
            connections[ours] = None
        for connection in connections:
            connections[connection] = _give(connection, waiting)
        while any(connections.values()):
            for ready in wait([connection for connection, job in connections.items() if job]):
                connection = cast(Connection, ready)
                job = connections[connection]
                assert job is not None
                try:
                    message = connection.recv()
                except (EOFError, ConnectionResetError):
                    raise DataError(
                        f"the process that wrote {job.unit.source} was killed, perhaps for want of memory; "
                        "run the same command again with fewer --processes"
                    ) from None
                if isinstance(message, Progress):
                    report(message)
                elif isinstance(message, CommandEnd):
                    raise message
                elif message is None:
                    logger.info("unit %d finished: %s", job.number, job.unit.source)
                    connections[connection] = _give(connection, waiting)
                else:
                    raise RuntimeError(f"a worker failed on {job.unit.source}\n{message}")
    finally:
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.join()


def _give(connection: Connection, waiting: list[Job]) -> Job | None:
    if not waiting:
        return None
    job = waiting.pop()
    with contextlib.suppress(BrokenPipeError):  # found out when its answer is read
        connection.send(job)
    return job


def _work(connection: Connection, parent: int) -> None:
    """A worker process: jobs in, progress and None (finished) or the failure out."""
    # Where the kernel does not tell, the broken pipe must do.
    signal_at_parents_death(signal.SIGKILL, parent=parent)
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        try:
            write_unit(job, connection.send)
            connection.send(None)
        except BrokenPipeError:
            return
        except Exception as error:
            connection.send(end_for(error) or traceback.format_exc())


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


# ------------------------------------------------------------------------------------------------------ output folders


@contextlib.contextmanager
def _claimed(output: Path) -> Iterator[None]:
    """Hold a folder for this command alone; it must be new, empty, or one of ours."""
    check_name(str(output), "output folder")
    try:
        is_new = not output.exists()
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"folder {output} cannot be made ({error.strerror}); choose a writable folder") from error
    descriptor = os.open(output, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(f"another command is writing to {output}; wait for it or choose another folder") from error
        except OSError:
            logger.warning("the file system of %s has no locks: let only one command write there", output)
        names = sorted(path.name for path in output.iterdir())
        if PREPARATION not in names and (strangers := sorted({*names} - {SCRATCH})):
            raise DataError(f"folder {output} holds other files ({strangers[0]}); choose an empty or new folder")
        try:
            yield
        finally:
            shutil.rmtree(output / SCRATCH, ignore_errors=True)
            # A command that finished nothing leaves no trace.
            # Receipts of units without samples are soon written again.
            if PREPARATION not in names and not any(
                path.exists() and path.parent.name != "units" for path in (*_finished(output), *output.glob("*.tar"))
            ):
                _clear(output)
    finally:
        if is_new:
            with contextlib.suppress(OSError):
                output.rmdir()
        os.close(descriptor)


def _finished(output: Path) -> list[Path]:
    """What a command leaves once a part of its work is done."""
    return [output / MANIFEST, output / "tokenizer.json", output / "pairs.jsonl", *output.glob("units/*.json")]


def _clear(output: Path) -> None:
    """Remove what a command of ours began in a folder that was empty before."""
    with contextlib.suppress(OSError):
        leftovers = (*output.glob("shard-*.tar*"), *output.glob("units/*.json*"), output / SEEN, output / PREPARATION)
        for leftover in leftovers:
            leftover.unlink(missing_ok=True)
        if (output / "units").is_dir():
            (output / "units").rmdir()


def _settle(output: Path, preparation: dict[str, Any]) -> str:
    """Record what the folder is made from, or check that it is the same as before; returns its sha256."""
    path = output / PREPARATION
    content = json.dumps({"format": FORMAT, **preparation}, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    before = read_text(path) if path.exists() else ""
    if before and before != content:
        if any(file.exists() for file in _finished(output)):
            raise DataError(
                f"folder {output} holds something made with other {_differing(before, content)}; "
                "choose an empty folder, or delete this one first"
            )
        # Nothing was finished, as after a mistake in the data: a mended command may start afresh.
        for leftover in output.glob("shard-*.tar*"):
            leftover.unlink()
    if before != content:
        temporary = output / SCRATCH / PREPARATION
        temporary.parent.mkdir(exist_ok=True)
        temporary.write_text(content, encoding="utf-8")
        temporary.replace(path)
    return hashlib.sha256(content.encode()).hexdigest()


def _differing(before_text: str, now_text: str) -> str:
    now = json.loads(now_text)
    try:
        before = json.loads(before_text)
    except ValueError:
        before = None
    if not isinstance(before, dict):
        return "settings"
    if before.get("format") != now["format"]:
        return f"versions of this command (format {before.get('format')} instead of {now['format']})"
    names = []
    for key in sorted({*before, *now}):
        if before.get(key) == now.get(key):
            continue
        if key == "options" and isinstance(before.get(key), dict):
            names += [name for name in sorted(now[key]) if before[key].get(name) != now[key][name]]
        elif key != "units" or before.get("inputs") == now.get("inputs"):
            names.append(key)
    return ", ".join(name.replace("_", " ") for name in names)


class _Inputs:
    """The files that a command reads: what identifies each, and whether it is still the same."""

    def __init__(self, output: Path, units: Sequence[Unit], *, processes: int) -> None:
        self._path = output / SEEN
        paths: dict[str, None] = {}
        # Made of the inputs by this command, and anew each time: no mark of it would hold.
        self._joined: dict[str, str] = {}
        self._others: list[str] = []
        for unit in units:
            if isinstance(unit.layout, IdLayout):
                self._joined[f"{unit.source.rpartition('[')[0]} joined"] = unit.path
                paths[str(TextIndex.path_in(Path(unit.layout.index)))] = None
            elif unit.kind == "hub":
                self._others.append(unit.source.rpartition("[")[0])
            else:
                paths[unit.path] = None
        before = self._read()
        self._seen: dict[str, list[str]] = {}
        # Hashing leaves Python to its threads.
        with ThreadPoolExecutor(max_workers=max(1, min(processes, 8))) as pool:
            for path, seen in zip(paths, pool.map(lambda path: _seen(path, before.get(path)), paths)):
                self._seen[path] = seen

    @property
    def identity(self) -> dict[str, Any]:
        """What decides the output, as JSON values."""
        found: dict[str, Any] = {path: {"sha256": digest} for path, (_, digest) in self._seen.items()}
        found |= {name: {"sha256": sha256_of(path)} for name, path in self._joined.items()}
        return found | dict.fromkeys(self._others)

    def remember(self) -> None:
        write_atomically(self._path, json.dumps(self._seen, indent=1, ensure_ascii=False) + "\n")

    def check(self) -> None:
        """Refuse an input that changed while it was read: no unit could tell which of its bytes it met."""
        for path, seen in self._seen.items():
            if _seen(path, seen)[1] != seen[1]:
                raise DataError(
                    f"{path} was changed while it was read; delete {self._path.parent} and run the command again"
                )

    def _read(self) -> dict[str, list[str]]:
        try:
            found = json.loads(self._path.read_bytes())
        except (OSError, ValueError, RecursionError):
            return {}
        # No more than a shortcut: whatever is not understood is hashed.
        entries = found.items() if isinstance(found, dict) else ()
        return {path: seen for path, seen in entries if isinstance(seen, list) and len(seen) == 2}


def _seen(path: str, before: list[str] | None) -> list[str]:
    """[what a file looks like, its sha256], which is that of `before` if it looks the same."""
    with reading(path):
        looks = looks_of(Path(path).stat())
        return before if before is not None and before[0] == looks else [looks, sha256_of(path)]


def _skipped(units: Sequence[Unit]) -> str | None:
    """What tells the rows to skip from others: their file may change under its name."""
    rows = units[0].skip_rows
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest() if rows else None


# ------------------------------------------------------------------------------------------------------------ commands


def prepare_shards(arguments: argparse.Namespace) -> None:
    """`documents` and `tuples`: write the shards of every unit that is not there yet, then the manifest."""
    kind: Kind = arguments.command
    output = Path(arguments.output)
    started = time.monotonic()
    scratch = output / SCRATCH
    with _claimed(output):
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        tokenizer = load_tokenizer(arguments.tokenizer)
        fingerprint = tokenizer_fingerprint(tokenizer)
        size = vocabulary_of(tokenizer).size
        options = {name: getattr(arguments, name) for name in arguments.identity}
        plan = _plan_documents if kind == "documents" else _plan_tuples
        units = plan(arguments, output)
        inputs = _Inputs(output, units, processes=arguments.processes)
        preparation = {
            "kind": kind,
            "options": options,
            "tokenizer": fingerprint,
            "inputs": inputs.identity,
            "skipped_rows": _skipped(units),
            "units": [unit.source + (f" first {unit.limit}" if unit.limit else "") for unit in units],
        }
        settings = {"preparation": _settle(output, preparation)}
        inputs.remember()
        unfinished = [
            number for number in range(len(units)) if finished_unit(output, number, settings=settings) is None
        ]
        if not unfinished and _is_whole(output):
            _say(f"{output} is already complete")
            return
        # A shard of a finished folder was lost: until it is there again, the folder is not finished.
        (output / MANIFEST).unlink(missing_ok=True)

        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        backend["truncation"] = backend["padding"] = None
        tokenizer_file = scratch / "tokenizer.json"
        tokenizer_file.write_text(json.dumps(backend, ensure_ascii=False), encoding="utf-8")
        jobs = [
            Job(
                number=number,
                unit=unit,
                kind=kind,
                output=str(output),
                tokenizer_file=str(tokenizer_file),
                vocabulary_size=size,
                graded=unit.graded,
                settings=settings,
                seed=arguments.seed,
                shard_bytes=arguments.shard_megabytes * 2**20,
                chunk_samples=arguments.chunk_samples,
                query_prompt=getattr(arguments, "query_prompt", ""),
                passage_prompt=getattr(arguments, "passage_prompt", ""),
            )
            for number, unit in enumerate(units)
            if number in unfinished
        ]
        if len(jobs) < len(units):
            logger.warning("%d of %d units are finished already", len(units) - len(jobs), len(units))
        text_bytes = _run_with_bar(jobs, processes=arguments.processes)
        inputs.check()
        manifest = finish_folder(output, len(units), tokenizer=tokenizer, name=str(arguments.tokenizer))
    seconds = time.monotonic() - started
    _say(
        f"{manifest.samples:,} {kind}, {manifest.tokens:,} tokens, {len(manifest.shards):,} shards in {output} "
        f"({seconds:.1f} s, {text_bytes / 1e6 / seconds:.1f} MB/s of text)"
    )


def _is_whole(output: Path) -> bool:
    """Whether a folder whose units are all there has the rest as well."""
    if not (output / MANIFEST).exists():
        return False
    try:
        folder = ShardFolder(output, verify="size")
        folder.check_tokenizer(load_tokenizer(folder.tokenizer_path))
    except OtherFormat:
        raise
    except DataError as error:
        logger.warning("%s is finished again: %s", output, error)
        return False
    return True


def _plan_documents(arguments: argparse.Namespace, output: Path) -> list[Unit]:
    return plan_documents(
        arguments.inputs,
        text_column=arguments.text_column,
        text_split=arguments.text_split,
        skip_empty=arguments.skip_empty,
        subset=arguments.subset,
        split=arguments.split,
        skip=getattr(arguments, "skip_first", 0),
        limit=arguments.limit,
        longest_line=arguments.longest_line * 2**20,
        output=output,
    )


def _plan_tuples(arguments: argparse.Namespace, output: Path) -> list[Unit]:
    return plan_tuples(
        arguments.inputs,
        scratch=output / SCRATCH,
        format=arguments.format,
        query_column=arguments.query_column,
        positive_columns=arguments.positive_column,
        negative_columns=arguments.negative_column,
        score_column=arguments.score_column,
        columns=arguments.columns,
        negatives_file=arguments.negatives,
        max_negatives=arguments.max_negatives,
        skip_rows=arguments.skip_rows,
        skip_empty=arguments.skip_empty,
        subset=arguments.subset,
        split=arguments.split,
        limit=arguments.limit,
        longest_line=arguments.longest_line * 2**20,
        output=output,
    )


def _run_with_bar(jobs: Sequence[Job], *, processes: int) -> int:
    """Run the jobs behind a progress bar; returns the bytes of text tokenized."""
    total = sum(job.unit.size for job in jobs) if all(job.unit.size for job in jobs) else None
    text_bytes = samples = tokens = 0
    # A log file gets a line now and then, a terminal a living bar.
    interval = 0.2 if sys.stderr.isatty() else 30
    with (
        logging_redirect_tqdm(),
        tqdm(total=total, unit="B", unit_scale=True, mininterval=interval, file=sys.stderr, desc="preparing") as bar,
    ):

        def report(progress: Progress) -> None:
            nonlocal text_bytes, samples, tokens
            text_bytes += progress.text_bytes
            samples += progress.samples
            tokens += progress.tokens
            bar.set_postfix_str(f"{samples:,} samples, {tokens:,} tokens", refresh=False)
            bar.update(progress.source_bytes if total is not None else progress.text_bytes)

        run_jobs(jobs, processes=processes, report=report)
    return text_bytes


def train_tokenizer(arguments: argparse.Namespace) -> None:
    """`tokenizer`: a WordPiece vocabulary with BERT's special tokens and normaliser."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    output = Path(arguments.output)
    started = time.monotonic()
    with _claimed(output):
        units = _plan_documents(arguments, output)
        options = {name: getattr(arguments, name) for name in arguments.identity}
        inputs = _Inputs(output, units, processes=_default_processes())
        _settle(output, {"kind": "tokenizer", "options": options, "inputs": inputs.identity})
        inputs.remember()
        if (output / "tokenizer.json").exists():
            _say(f"{output} is already complete")
            return
        backend = Tokenizer(models.WordPiece(unk_token="[UNK]", max_input_chars_per_word=100))
        backend.normalizer = normalizers.BertNormalizer(lowercase=not arguments.keep_case)
        backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        backend.decoder = decoders.WordPiece(prefix="##")
        trainer = trainers.WordPieceTrainer(
            vocab_size=arguments.vocab_size,
            min_frequency=arguments.min_frequency,
            special_tokens=list(SPECIAL_TOKENS),
            show_progress=sys.stderr.isatty(),
        )
        texts = (cast(Document, record)["text"] for unit in units for _, record in read_unit(unit))
        backend.train_from_iterator(texts, trainer)
        # Training numbers pieces in the order of a hash map: sorted, equal pieces make an equal tokenizer.
        pieces = sorted(set(backend.get_vocab()) - set(SPECIAL_TOKENS), key=lambda piece: (len(piece), piece))
        if not pieces:
            raise DataError("the inputs hold no word, so every text would be [UNK]; give files with text")
        inputs.check()
        vocabulary = {piece: index for index, piece in enumerate((*SPECIAL_TOKENS, *pieces))}
        backend.model = models.WordPiece(vocab=vocabulary, unk_token="[UNK]", max_input_chars_per_word=100)
        cls_id, sep_id = (backend.token_to_id(token) for token in ("[CLS]", "[SEP]"))
        backend.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[("[CLS]", cls_id), ("[SEP]", sep_id)],
        )
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=backend,
            model_max_length=arguments.max_length,
            model_input_names=["input_ids", "token_type_ids", "attention_mask"],
            **{f"{token.strip('[]').lower()}_token": token for token in SPECIAL_TOKENS},
        )
        temporary = output / SCRATCH
        shutil.rmtree(temporary, ignore_errors=True)
        save_tokenizer(tokenizer, temporary)
        # tokenizer.json last: it is what makes the folder complete.
        for path in sorted(temporary.iterdir(), key=lambda path: path.name == "tokenizer.json"):
            path.replace(output / path.name)
    _say(f"{len(tokenizer):,} tokens in {output} ({time.monotonic() - started:.1f} s)")


def collect_documentation(arguments: argparse.Namespace) -> None:
    """`installed-docs`: documents, training pairs and a held-out evaluation set from the installed packages."""
    output = Path(arguments.output)
    started = time.monotonic()
    packages = arguments.package or list(DOCUMENTED_PACKAGES)
    with _claimed(output):
        options = {name: getattr(arguments, name) for name in arguments.identity}
        versions = {package: _version(package) for package in packages}
        _settle(output, {"kind": "installed-docs", "options": options, "package versions": versions})
        done = output / "held-out" / "qrels" / "test.tsv"
        if done.exists():
            _say(f"{output} is already complete")
            return
        documentation = installed_documentation(
            arguments.package or None,
            num_held_out=arguments.held_out,
            num_bodies=arguments.bodies,
            processes=arguments.processes,
        )
        write_documentation(documentation, output)
    megabytes = sum(map(len, documentation.documents)) / 1e6
    _say(
        f"{len(documentation.documents):,} documents ({megabytes:.1f} M characters), {len(documentation.pairs):,} "
        f"training pairs, {len(documentation.held_out):,} held-out queries over "
        f"{len(documentation.held_out) + len(documentation.distractors):,} bodies in {output} "
        f"({time.monotonic() - started:.1f} s)"
    )


def _version(package: str) -> str:
    if package == STANDARD_LIBRARY:
        return sys.version.split()[0]
    try:
        return version({"sklearn": "scikit-learn"}.get(package, package))
    except PackageNotFoundError:
        return ""


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


# -------------------------------------------------------------------------------------------------------- command line


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m data.prepare", description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    inputs_help = "files, folders, quoted globs, or the name of a Hugging Face data set"

    documents = commands.add_parser(
        "documents",
        help="text -> shards of documents, for pre-training",
        description="Tokenize documents from .parquet, .jsonl, .tsv and .txt files (.gz and .zst of the text formats) "
        "or a Hugging Face data set, without truncation, into shards. Run the same command again after a kill.",
    )
    documents.add_argument("inputs", nargs="+", metavar="INPUT", help=inputs_help)
    _shard_options(documents)
    _source_options(documents)
    _text_options(documents)
    documents.add_argument(
        "--skip-first",
        metavar="N",
        type=int,
        default=0,
        help="leave the first N records of the first input out, to evaluate on (default 0)",
    )
    documents.set_defaults(
        run=prepare_shards,
        identity=[
            "text_column",
            "text_split",
            "subset",
            "split",
            "skip_first",
            "limit",
            "seed",
            "shard_megabytes",
            "chunk_samples",
        ],
    )

    tuples = commands.add_parser(
        "tuples",
        help="pairs, triplets, n-tuples and graded pairs -> shards, for fine-tuning",
        description="Tokenize queries with their positive and negative passages from .parquet, .jsonl and .tsv files, "
        "a Hugging Face data set, MS MARCO's own files or a BEIR folder, without truncation, into shards. "
        "Run the same command again after a kill.",
    )
    tuples.add_argument("inputs", nargs="+", metavar="INPUT", help=inputs_help)
    _shard_options(tuples)
    _source_options(tuples)
    tuples.add_argument(
        "--format",
        choices=TUPLE_FORMATS,
        default="auto",
        help="columns: by column name; nli: TSV with a header, columns anchor, entailed, contradicted; sts: TSV "
        "without a header, columns score, sentence1, sentence2; msmarco: folder of collection.tsv, queries.SPLIT.tsv "
        "and qrels.SPLIT.tsv; beir: folder of corpus.jsonl, queries.jsonl and qrels/SPLIT.tsv; "
        "auto: the folders by their files, else columns (default)",
    )
    tuples.add_argument("--query-column", metavar="NAME", help="default: query, anchor, question or sentence1")
    tuples.add_argument(
        "--positive-column",
        metavar="NAME",
        action="append",
        default=[],
        help="may be repeated; holds a text, a list of texts or of {title, text} passages "
        "(default: positive, positives, pos, positive_passages, answer or sentence2)",
    )
    tuples.add_argument(
        "--negative-column",
        metavar="NAME",
        action="append",
        default=[],
        help="may be repeated (default, if no column is named: negative, negatives, negative_1, hard_negative, neg, "
        "negative_passages and the like)",
    )
    tuples.add_argument(
        "--score-column", metavar="NAME", help="makes graded pairs (default, if no column is named: score, if present)"
    )
    tuples.add_argument(
        "--columns",
        metavar="NAME,NAME,...",
        type=lambda text: text.split(","),
        default=[],
        help="the columns of TSV files that have no header",
    )
    tuples.add_argument(
        "--negatives",
        metavar="FILE",
        help='hard negatives by id for msmarco and beir, jsonl (.gz, .zst): {"qid", "neg": [ids]} or '
        '{"qid", "neg": {system: [ids]}}, as in sentence-transformers\' msmarco-hard-negatives',
    )
    tuples.add_argument(
        "--max-negatives", metavar="N", type=int, default=50, help="of --negatives a query (default 50)"
    )
    tuples.add_argument(
        "--skip-rows", metavar="FILE", help="0-based data rows to drop, one number a line; one input only"
    )
    tuples.add_argument("--query-prompt", metavar="TEXT", default="", help="put before every query")
    tuples.add_argument("--passage-prompt", metavar="TEXT", default="", help="put before every passage")
    tuples.set_defaults(
        run=prepare_shards,
        identity=[
            *("subset", "split", "limit", "seed", "shard_megabytes", "chunk_samples", "format", "query_column"),
            *("positive_column", "negative_column", "score_column", "columns", "negatives", "max_negatives"),
            *("skip_rows", "query_prompt", "passage_prompt"),
        ],
    )

    tokenizer = commands.add_parser(
        "tokenizer",
        help="train a WordPiece tokenizer on documents",
        description="Train a WordPiece tokenizer with BERT's special tokens and normaliser; AutoTokenizer loads it.",
    )
    tokenizer.add_argument("inputs", nargs="+", metavar="INPUT", help=inputs_help)
    tokenizer.add_argument("--output", required=True, metavar="FOLDER", help="a new or empty folder")
    tokenizer.add_argument("--vocab-size", metavar="N", type=int, default=30522, help="tokens (default 30522)")
    tokenizer.add_argument("--min-frequency", metavar="N", type=int, default=2, help="of a piece (default 2)")
    tokenizer.add_argument("--keep-case", action="store_true", help="do not lower-case")
    tokenizer.add_argument("--max-length", metavar="N", type=int, default=512, help="model_max_length (default 512)")
    _source_options(tokenizer)
    _text_options(tokenizer)
    tokenizer.set_defaults(
        run=train_tokenizer,
        identity=[
            *("text_column", "text_split", "subset", "split", "limit"),
            *("vocab_size", "min_frequency", "keep_case", "max_length"),
        ],
    )

    docs = commands.add_parser(
        "installed-docs",
        help="a corpus from the documentation of the installed packages",
        description="Collect the docstrings of installed packages by parsing their files: documents.jsonl, pairs.jsonl "
        "(query: summary, positive: body) and held-out/, a BEIR folder of summaries and bodies that occur in neither.",
    )
    docs.add_argument("--output", required=True, metavar="FOLDER", help="a new or empty folder")
    docs.add_argument(
        "--package",
        metavar="NAME",
        action="append",
        default=[],
        help=f"may be repeated (default: those installed of {', '.join(DOCUMENTED_PACKAGES)})",
    )
    docs.add_argument("--held-out", metavar="N", type=int, default=500, help="evaluation queries (default 500)")
    docs.add_argument("--bodies", metavar="N", type=int, default=5000, help="evaluation passages (default 5000)")
    docs.add_argument("--processes", metavar="N", type=int, default=_default_processes(), help=_PROCESSES_HELP)
    docs.set_defaults(run=collect_documentation, identity=["package", "held_out", "bodies"])

    for command in (documents, tuples, tokenizer, docs):
        command.add_argument("--verbose", action="store_true", help="log every finished unit")
    return parser


_PROCESSES_HELP = "default: the CPUs this command may use"


def _default_processes() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _shard_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", required=True, metavar="FOLDER", help="a new or empty folder, or an unfinished one")
    parser.add_argument("--tokenizer", required=True, metavar="NAME", help="folder or hub name of a fast tokenizer")
    parser.add_argument("--processes", metavar="N", type=int, default=_default_processes(), help=_PROCESSES_HELP)
    parser.add_argument(
        "--shard-megabytes", metavar="N", type=int, default=SHARD_BYTES // 2**20, help="at most (default 128)"
    )
    parser.add_argument(
        "--chunk-samples", metavar="N", type=int, default=CHUNK_SAMPLES, help="samples a tar member (default 1024)"
    )
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of the shuffle within units (default 0)")


def _source_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--limit", metavar="N", type=int, help="take only the first N records")
    parser.add_argument(
        "--longest-line",
        metavar="MIB",
        type=int,
        default=LONGEST_LINE // 2**20,
        help="refuse lines and documents of more (default 1024)",
    )
    parser.add_argument("--skip-empty", action="store_true", help="drop empty texts instead of stopping at the first")
    parser.add_argument("--subset", metavar="NAME", help="configuration of a hub data set, such as sample-10BT")
    parser.add_argument(
        "--split", metavar="NAME", default="train", help="of a hub data set or of qrels (default train)"
    )


def _text_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--text-column", metavar="NAME", default="text", help="default: text")
    parser.add_argument(
        "--text-split",
        choices=TEXT_SPLITS,
        default="blank-lines",
        help="what divides the documents of a .txt file (default blank-lines)",
    )


# What numbers may be, and why.
BOUNDS = {
    "skip_first": (0, 2**40),
    "limit": (1, 2**60),
    "processes": (1, 4096),
    "shard_megabytes": (1, 2**16),
    "chunk_samples": (1, 2**24),
    "longest_line": (1, 2**16),
    "max_negatives": (0, MOST_NEGATIVES),
    "vocab_size": (len(SPECIAL_TOKENS) + 1, LARGEST_ID),
    "min_frequency": (1, 2**40),
    "max_length": (3, 2**30),  # [CLS], a token and [SEP]
    "held_out": (1, 10**9),
    "bodies": (1, 10**9),
}


def run(argv: Sequence[str]) -> None:
    """One command, as another program calls it. Raises UserError for what is wrong with it."""
    _run(_parser().parse_args(argv))


def _run(arguments: argparse.Namespace) -> None:
    for name, (low, high) in BOUNDS.items():
        value = getattr(arguments, name, None)
        if value is not None and not low <= value <= high:
            raise DataError(f"--{name.replace('_', '-')} {value} is not possible; give between {low} and {high}")
    for name, value in vars(arguments).items():
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str):
                check_name(text, f"argument {name.replace('_', '-')}")
    if hasattr(arguments, "seed"):
        check_seed(arguments.seed)
    arguments.run(arguments)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    arguments = _parser().parse_args(argv)
    log_to_stderr(level=logging.INFO if arguments.verbose else logging.WARNING)
    code = exit_code_of(lambda: _run(arguments))
    if code == INTERRUPTED_CODE:
        sys.stderr.write("interrupted; run the same command again to go on\n")
    return code


def _exit_on_terminate() -> None:
    """Let SIGTERM unwind the stack, so that workers are killed and the folder is let go."""

    def stop(number: int, frame: object) -> None:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, stop)


if __name__ == "__main__":
    _exit_on_terminate()
    sys.exit(main())
