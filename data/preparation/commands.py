"""The sub-commands of `python -m data.prepare`."""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import shutil
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from data.corpora.options import SourceOptions, TupleOptions
from data.corpora.plan import plan_documents, plan_tuples
from data.corpora.read import read_split
from data.corpora.splits import Document, DocumentLayout, InputSplit, TupleLayout
from data.documentation import (
    DOCUMENTED_PACKAGES,
    STANDARD_LIBRARY,
    installed_documentation,
    write_documentation,
)
from data.ground.errors import DataError, OtherFormat
from data.ground.options import stated_in
from data.inputs import SCRATCH
from data.preparation.convert import Job, Progress
from data.preparation.output_folder import Inputs, claimed, settle
from data.preparation.workers import default_processes, run_jobs
from data.shards.format import MANIFEST, Kind, Prompts
from data.shards.reader import ShardFolder
from data.shards.writer import finish_folder, finished_split
from data.tokens import append_token, load_tokenizer, save_tokenizer, tokenizer_fingerprint, vocabulary_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def _skipped(input_splits: Sequence[InputSplit]) -> str | None:
    """A hash of the rows to skip: the file that lists them may change under its name."""
    rows = input_splits[0].skip_rows
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest() if rows else None


def _options_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options that decide what the shards hold.

    Options of later versions are there only where they are given, so that folders of earlier versions can be finished.
    """
    later = {name: getattr(arguments, name, None) for name in ("append_token", "weight_column")}
    given = {name: value for name, value in later.items() if value}
    return {name: getattr(arguments, name) for name in arguments.identity} | given


def prepare_shards(arguments: argparse.Namespace) -> None:
    """`documents` and `tuples`: write the shards of every unfinished input split, then the manifest."""
    kind: Kind = arguments.command
    output = Path(arguments.output)
    started = time.monotonic()
    scratch = output / SCRATCH
    with claimed(output):
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        tokenizer = load_tokenizer(arguments.tokenizer)
        options = _options_of(arguments)
        if arguments.append_token:
            tokenizer = _with_token(tokenizer, arguments.append_token, scratch / "tokenizer")
        fingerprint = tokenizer_fingerprint(tokenizer)
        size = vocabulary_of(tokenizer).size
        plan = _plan_documents if kind == "documents" else _plan_tuples
        input_splits = plan(arguments, output)
        inputs = Inputs(output, input_splits, processes=arguments.processes)
        preparation: dict[str, Any] = {
            "kind": kind,
            "options": options,
            "tokenizer": fingerprint,
            "inputs": inputs.identity,
            "skipped_rows": _skipped(input_splits),
            "units": [each.source + (f" first {each.limit}" if each.limit else "") for each in input_splits],
        }
        weighted = any(each.weighted for each in input_splits)
        if weighted:
            preparation["weights"] = True
        settings = {"preparation": settle(output, preparation)}
        inputs.remember()
        unfinished = [
            number for number in range(len(input_splits)) if finished_split(output, number, settings=settings) is None
        ]
        if not unfinished and _is_whole(output):
            _say(f"{output} is already complete")
            return
        # Where a shard of a finished folder was lost, the folder is unfinished until the shard is written again.
        (output / MANIFEST).unlink(missing_ok=True)

        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        backend["truncation"] = backend["padding"] = None
        tokenizer_file = scratch / "tokenizer.json"
        tokenizer_file.write_text(json.dumps(backend, ensure_ascii=False), encoding="utf-8")
        prompts = Prompts(query=options.get("query_prompt", ""), passage=options.get("passage_prompt", ""))
        jobs = [
            Job(
                number=number,
                input_split=input_splits[number],
                kind=kind,
                output=str(output),
                tokenizer_file=str(tokenizer_file),
                vocabulary_size=size,
                graded=input_splits[number].graded,
                weighted=weighted,
                settings=settings,
                seed=arguments.seed,
                shard_bytes=arguments.shard_megabytes * 2**20,
                chunk_samples=arguments.chunk_samples,
                query_prompt=prompts.query,
                passage_prompt=prompts.passage,
            )
            for number in unfinished
        ]
        if len(jobs) < len(input_splits):
            logger.warning(
                "%d of %d input splits are finished already", len(input_splits) - len(jobs), len(input_splits)
            )
        text_bytes = _run_with_bar(jobs, processes=arguments.processes)
        inputs.check()
        manifest = finish_folder(
            output,
            len(input_splits),
            tokenizer=tokenizer,
            name=str(arguments.tokenizer),
            appended=arguments.append_token,
            prompts=prompts,
        )
    seconds = time.monotonic() - started
    _say(
        f"{manifest.samples:,} {kind}, {manifest.tokens:,} tokens, {len(manifest.shards):,} shards in {output} "
        f"({seconds:.1f} s, {text_bytes / 1e6 / seconds:.1f} MB/s of text)"
    )


def _with_token(tokenizer: PreTrainedTokenizerFast, token: str, scratch: Path) -> PreTrainedTokenizerFast:
    """The tokenizer with a token appended to every text, as it is after saving and loading."""
    name = tokenizer.name_or_path
    append_token(tokenizer, token)
    save_tokenizer(tokenizer, scratch)
    # Classes of transformers that build a tokenizer from its vocabulary may set a post-processor of their own.
    loaded = load_tokenizer(scratch)
    if tokenizer_fingerprint(loaded) != tokenizer_fingerprint(tokenizer):
        raise DataError(
            f"tokenizer {name!r} of the class {type(tokenizer).__name__} loses {token!r} when it is saved and loaded; "
            "save it as a PreTrainedTokenizerFast first"
        )
    return loaded


def _is_whole(output: Path) -> bool:
    """Whether a folder with all its input splits also has a sound manifest and tokenizer."""
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


def _plan_documents(arguments: argparse.Namespace, output: Path) -> list[InputSplit]:
    layout = DocumentLayout(arguments.text_column, arguments.text_split)
    skip = getattr(arguments, "skip_first", 0)
    return plan_documents(arguments.inputs, layout, _source_options(arguments), skip=skip, output=output)


def _plan_tuples(arguments: argparse.Namespace, output: Path) -> list[InputSplit]:
    tuples = TupleOptions(
        arguments.format,
        TupleLayout(
            arguments.query_column or "",
            tuple(arguments.positive_column),
            tuple(arguments.negative_column),
            arguments.score_column,
            arguments.weight_column,
        ),
        tuple(arguments.columns),
        negatives_file=arguments.negatives,
        max_negatives=arguments.max_negatives,
        skip_rows=arguments.skip_rows,
    )
    return plan_tuples(arguments.inputs, tuples, _source_options(arguments), scratch=output / SCRATCH, output=output)


def _source_options(arguments: argparse.Namespace) -> SourceOptions:
    return SourceOptions(
        limit=arguments.limit,
        longest_line=arguments.longest_line * 2**20,
        skip_empty=arguments.skip_empty,
        subset=arguments.subset,
        split=arguments.split,
        stated=stated_in(arguments),
    )


def _run_with_bar(jobs: Sequence[Job], *, processes: int) -> int:
    """Run the jobs behind a progress bar; returns the bytes of text tokenized."""
    total = sum(job.input_split.size for job in jobs) if all(job.input_split.size for job in jobs) else None
    text_bytes = samples = tokens = 0
    # A terminal shows a progress bar; a log file gets a line from time to time.
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
    with claimed(output):
        input_splits = _plan_documents(arguments, output)
        options = {name: getattr(arguments, name) for name in arguments.identity}
        inputs = Inputs(output, input_splits, processes=default_processes())
        settle(output, {"kind": "tokenizer", "options": options, "inputs": inputs.identity})
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
        texts = (
            cast(Document, record)["text"] for input_split in input_splits for _, record in read_split(input_split)
        )
        backend.train_from_iterator(texts, trainer)
        # Training numbers the tokens in the order of a hash map. Sorting them makes the tokenizer reproducible.
        tokens = sorted(set(backend.get_vocab()) - set(SPECIAL_TOKENS), key=lambda token: (len(token), token))
        if not tokens:
            raise DataError("the inputs hold no word, so every text would be [UNK]; give files with text")
        inputs.check()
        vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *tokens))}
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
        # tokenizer.json is moved last: its presence marks the folder as complete.
        for path in sorted(temporary.iterdir(), key=lambda path: path.name == "tokenizer.json"):
            path.replace(output / path.name)
    _say(f"{len(tokenizer):,} tokens in {output} ({time.monotonic() - started:.1f} s)")


def collect_documentation(arguments: argparse.Namespace) -> None:
    """`installed-docs`: documents, training pairs and a held-out evaluation set from the installed packages."""
    output = Path(arguments.output)
    started = time.monotonic()
    packages = arguments.package or list(DOCUMENTED_PACKAGES)
    with claimed(output):
        options = {name: getattr(arguments, name) for name in arguments.identity}
        versions = {package: _version(package) for package in packages}
        settle(output, {"kind": "installed-docs", "options": options, "package versions": versions})
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
