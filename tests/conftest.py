"""Shared fixtures: English texts that every installation has, a small tokenizer trained on them, and test data.

The environment is set before anything imports torch: no accelerator, no network, and one thread per process, because
tests start ranks and workers of their own. Each test's lane (tests/lanes.py) is also set here.
"""

from __future__ import annotations

import ast
import os
import signal
import sysconfig
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.update(
    OMP_NUM_THREADS="1",
    DS_ACCELERATOR="cpu",
    TOKENIZERS_PARALLELISM="false",
    HF_HUB_OFFLINE="1",
)

import pytest

from data.minilm import NoPackage, minilm_folder
from tests import ROOT
from tests.lanes import COLLECTED, DECLARATIONS, LANES, Guard, LaneError, declared_by, lane_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

GUARD = Guard()
NUM_DOCSTRINGS = 3000
TINY_VOCABULARY = 2000  # tokens
# The package's own tests are no documentation.
SKIPPED_FOLDERS = {"test", "tests", "testing"}
# The fields of statements that hold statements.
BLOCKS = ("body", "handlers", "orelse", "finalbody", "cases")
LARGEST_SOURCE = 30_000  # bytes; longer modules take longer to parse than their docstrings are worth


def pytest_configure(config: pytest.Config) -> None:
    for name, what in (LANES | DECLARATIONS).items():
        config.addinivalue_line("markers", f"{name}: {what}")
    config.addinivalue_line(
        "markers", "needs(*names): the cases of its module's launch that a test needs (tests/needs.py)"
    )
    config.addinivalue_line("markers", "long: of a file that takes minutes, which begins before the others")
    GUARD.install()
    # Tests that a shell starts in its background ignore Ctrl-C, and so does every process that they start.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # the marks must be set before -m selects by them
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark each test with the lane that follows from what it declares."""
    config.stash[COLLECTED] = list(items)
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        try:
            lane = lane_of(declared_by(item), marks)
        except LaneError as error:
            raise pytest.UsageError(f"{item.nodeid} {error}") from None
        if lane not in marks:
            item.add_marker(lane)
    # The longest files come first: a long file at the end keeps one worker busy while the other waits.
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    with GUARD.watching(declared_by(item)):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    with GUARD.watching(declared_by(item)):
        return (yield)


@pytest.fixture(scope="session")
def processes() -> None:
    """Declares that the test or fixture that uses it starts processes (tests/lanes.py)."""


@pytest.fixture(scope="session")
def launcher() -> None:
    """Declares that the test or fixture that uses it starts several ranks, a launcher, a Slurm cluster, or hosts."""


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real data sets beside the checkout; tests that need them are skipped elsewhere."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"needs the data sets of {folder}, which is absent")
    return folder


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The folder of all-MiniLM-L6-v2, a real model; tests that need it are skipped where its package is absent."""
    try:
        return minilm_folder()
    except NoPackage as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def docstrings() -> list[str]:
    """Three thousand texts of torch's documentation, in a fixed order. No two begin with the same words.

    torch is pinned, so every machine has the same texts; the standard library's texts differ between Python versions.
    """
    texts: dict[str, str] = {}  # first words -> text
    package = Path(sysconfig.get_paths()["purelib"]) / "torch"
    for path in sorted(package.rglob("*.py")):
        if SKIPPED_FOLDERS & set(path.relative_to(package).parts) or path.stat().st_size > LARGEST_SOURCE:
            continue
        for text in _docstrings_of(ast.parse(path.read_text("utf-8"))):
            texts.setdefault(" ".join(text.split()[:8]), text)
        if len(texts) >= NUM_DOCSTRINGS:
            break
    return list(texts.values())[:NUM_DOCSTRINGS]


@pytest.fixture(scope="session")
def tiny_tokenizer_path(docstrings: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a lower-case WordPiece tokenizer of 2,000 tokens with BERT's special tokens; the same in every run."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from transformers import BertTokenizerFast

    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    pieces = _byte_pairs(docstrings, TINY_VOCABULARY // 2)
    vocabulary = [*specials, *pieces, *(f"##{piece}" for piece in pieces)][:TINY_VOCABULARY]
    backend = Tokenizer(models.WordPiece({token: i for i, token in enumerate(vocabulary)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##")
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    folder = tmp_path_factory.mktemp("tokenizer")
    BertTokenizerFast(tokenizer_object=backend).save_pretrained(folder)
    return folder


def _byte_pairs(texts: list[str], count: int) -> list[str]:
    """Letters and their most frequent joins, the same in every process.

    The library's own trainer for WordPiece gives every process a different vocabulary. It marks letters inside a word
    by "##" and numbers the marked letters in the order of a hash table. Between equally frequent joins, these numbers
    decide. The trainer for byte pairs marks no letters, so its vocabulary is always the same.
    """
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=count, show_progress=False))
    found = backend.get_vocab()
    return sorted(found, key=found.__getitem__)


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny_tokenizer_path: Path) -> PreTrainedTokenizerFast:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_tokenizer_path)


def _docstrings_of(tree: ast.Module) -> list[str]:
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = ((ast.get_docstring(node) or "").strip() for node in _statements(tree) if isinstance(node, owners))
    return [text for text in found if len(text.split()) >= 5]


def _statements(tree: ast.Module) -> list[ast.AST]:
    """The statements of a module in ast.walk's order. Expressions, most of a tree, hold no docstrings."""
    found: list[ast.AST] = [tree]
    for node in found:  # the list grows while it is read
        for field in BLOCKS:  # in the order of ast's own fields
            found += getattr(node, field, ())
    return found
