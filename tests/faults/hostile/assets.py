"""The tiny assets that all cases share, made once per invocation by the project's own commands."""

from __future__ import annotations

import os
import random
import shutil
import string
import traceback
from dataclasses import dataclass
from pathlib import Path

from tests.faults.hostile.builders import MODEL, beir, jsonl, keep, prepare, recipe_values, train, write
from tests.faults.hostile.case import Command
from tests.faults.hostile.process import Keeper, run_commands

SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
TOKENS = 192
DOCUMENTS, TUPLES = 211, 120
STOPPED_AT_STEP = 4
_SECONDS = 120.0


@dataclass(frozen=True)
class Assets:
    """Read-only assets: a case must copy what it wants to change."""

    root: Path

    @property
    def tokenizer(self) -> Path:
        """A WordPiece tokenizer of 192 tokens, with pieces for every lower-case word."""
        return self.root / "tokenizer"

    @property
    def documents_file(self) -> Path:
        """211 documents as JSON lines, column text."""
        return self.root / "documents.jsonl"

    @property
    def tuples_file(self) -> Path:
        """120 tuples as JSON lines: query, positive, negative."""
        return self.root / "tuples.jsonl"

    @property
    def sts_file(self) -> Path:
        """12 graded pairs as TSV: score, sentence, sentence."""
        return self.root / "sts.tsv"

    @property
    def beir(self) -> Path:
        """Three queries, six documents, split test."""
        return self.root / "beir"

    @property
    def documents(self) -> Path:
        """The shards of documents_file, in one shard."""
        return self.root / "documents"

    @property
    def tuples(self) -> Path:
        """The shards of tuples_file, in one shard."""
        return self.root / "tuples"

    @property
    def bert(self) -> Path:
        """A Hugging Face folder for model.source, 2 layers of width 32: weights, config and tokenizer."""
        return self.root / "bert"

    @property
    def run(self) -> Path:
        """A finished masked run over the documents: eight steps, the checkpoints of steps 6 and 8."""
        return self.root / "masked" / "run"

    @property
    def stopped_run(self) -> Path:
        """The same run, stopped at step 4, with the checkpoints of steps 2 and 4."""
        return self.root / "stopped" / "run"

    @property
    def finetuned_run(self) -> Path:
        """A finished contrastive run over the tuples from `bert`: two steps."""
        return self.root / "finetuned" / "run"

    @property
    def model(self) -> Path:
        """The model folder of finetuned_run, with barista.json."""
        return self.finetuned_run / "model"

    def copy(self, asset: Path, to: Path) -> Path:
        """Copy an asset for the case's own use; returns the copy's path."""
        if asset.is_dir():
            shutil.copytree(asset, to)
        else:
            shutil.copyfile(asset, to)
        return to


def make_assets(root: Path) -> Assets:
    """Make all assets, in a fork: the process from which cases are forked must do nothing but import."""
    root.mkdir(parents=True)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            _make(Assets(root))
            code = 0
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(code)
    if os.waitpid(child, 0)[1] != 0:
        raise RuntimeError("the shared assets could not be made")
    return Assets(root)


def _make(assets: Assets) -> None:
    root = assets.root
    rng = random.Random(0)
    vocabulary = _vocabulary(rng)
    words = [token for token in vocabulary if token.isalpha() and len(token) > 1]

    def text(least: int, most: int) -> str:
        return " ".join(rng.choices(words, k=rng.randint(least, most)))

    _save_tokenizer(assets.tokenizer, vocabulary)
    write(assets.documents_file, jsonl({"text": text(4, 40)} for _ in range(DOCUMENTS)))
    tuples = [{"query": text(3, 8), "positive": text(6, 20), "negative": text(6, 20)} for _ in range(TUPLES)]
    write(assets.tuples_file, jsonl(tuples))
    write(assets.sts_file, "".join(f"{index % 6}.0\t{text(3, 8)}\t{text(3, 8)}\n" for index in range(12)))
    beir(assets.beir)
    _save_bert(assets.bert, assets.tokenizer)

    _run(root, prepare(assets, "documents", assets.documents_file.name, output="documents"))
    _run(root, prepare(assets, "tuples", assets.tuples_file.name, output="tuples"))
    masked = recipe_values(assets.documents)
    contrastive = recipe_values(assets.tuples, "contrastive", train={"steps": 2})
    contrastive["model"] |= {"config": {}, "source": str(assets.bert)}
    for folder, values, more, code in (
        ("masked", masked, (), 0),
        ("stopped", masked, (f"--train.stop_at_step={STOPPED_AT_STEP}",), 0),
        ("finetuned", contrastive, (), 0),
    ):
        (root / folder).mkdir()
        _run(root / folder, train(root / folder, values, *more), code)


def _run(folder: Path, command: Command, code: int = 0) -> None:
    """Run a command with `folder` as its working folder."""
    keeper = Keeper(folder / "place", _SECONDS)
    keeper.make_folders()
    keeper.work.rmdir()
    keeper.work.symlink_to(folder)
    keep(keeper)
    ended, _ = run_commands(keeper, [command])
    assert ended[0].code == code, f"{command.module} ended with {ended[0].code}: {ended[0].err[-2000:]}"
    shutil.rmtree(keeper.place)


def _vocabulary(rng: random.Random) -> list[str]:
    letters = string.ascii_lowercase
    known = [*SPECIALS, *letters, *(f"##{letter}" for letter in letters), *string.digits, *(f"##{d}" for d in "0123")]
    words = dict.fromkeys(("the", "cat", "dog", "saw", "what", "is", "and", "milk", "coffee", "water", "bread"))
    while len(known) + len(words) < TOKENS:
        words["".join(rng.choices(letters, k=rng.randint(3, 6)))] = None
    return [*known, *words]


def _save_tokenizer(folder: Path, vocabulary: list[str]) -> None:
    from transformers import BertTokenizerFast

    file = folder.parent / "vocab.txt"
    write(file, "\n".join(vocabulary) + "\n")
    tokenizer = BertTokenizerFast(str(file))
    assert len(tokenizer) == TOKENS, len(tokenizer)
    tokenizer.save_pretrained(folder)


def _save_bert(folder: Path, tokenizer: Path) -> None:
    import torch
    from transformers.utils import logging

    from models.encoder import build_masked_lm

    logging.disable_progress_bar()
    torch.manual_seed(3)
    build_masked_lm(dict(MODEL), vocab_size=TOKENS, pad_token_id=0).save_pretrained(folder)
    shutil.copytree(tokenizer, folder, dirs_exist_ok=True)
