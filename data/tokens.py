"""The facts about a tokenizer that training needs: its frame, which tokens continue a word, and its fingerprint.

The frame is what a tokenizer puts before and after a text by itself: [CLS] and [SEP] in BERT, <s> and nothing in Llama,
nothing at all in Qwen3. It is read from the post-processor, the part of the tokenizer's JSON that adds these tokens, so
that training, evaluation and exports frame texts alike.

The fingerprint is the sha256 of the fast tokenizer's JSON without "truncation" and "padding": one padded call changes
these two settings, but they do not change the ids of a text. The fingerprint of the ids leaves the post-processor out,
too: tokenizers that share it give every text the same ids and may differ in the frame alone.

Whole-word masking (Starbucks §4, after BERT's whole-word masking) needs word boundaries from ids alone, because shards
hold ids. WordPiece marks continuations with "##"; byte-level BPE and SentencePiece mark word starts with a space sign.

In training, a recipe's prompt is tokenized once and put before ids that were tokenized without it; evaluation tokenizes
the joined text. `prompt_ids` refuses a prompt for which the two differ. A prompt that was prepared with the texts has
been tokenized with them, and may be any.

A model may have no rows for special tokens that no text gets by itself (`rows_needed`). A text may still spell one out,
and is then read as if the token were not special (`SpelledOut`).

Torch is not needed here; transformers is imported only when a tokenizer is loaded.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from data.ground.errors import DataError
from data.ground.files import first_line, reading, refused_by
from data.model_folders import transformer_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

# How byte-level BPE writes the white-space bytes: space, newline, tab, carriage return.
BYTE_LEVEL_SPACES = ("Ġ", "Ċ", "ĉ", "č")
# The largest token id: tables with one row per id must fit into memory.
LARGEST_ID = 2**24
# A place that a vocabulary keeps free for tokens to come: [unused12] in BERT's, <unused12> in Gemma's.
_FREE_PLACE = re.compile(r"\[unused\d+\]|<unused\d+>")
_SAVE_AGAIN = "save it again"
_ANY_TEXT = "text"
# Beginnings of texts with which a prompt is tested.
TEXT_BEGINNINGS = ("the first", "what is a", "A man in", "In this", "7 of them")


class Frame(NamedTuple):
    """The ids that a tokenizer puts before and after every text."""

    before: tuple[int, ...]
    after: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """Ids, frame and word boundaries of a tokenizer; every id in a shard is below `size`.

    The special ids include those of the frame.
    """

    size: int
    before: tuple[int, ...]  # what every text begins with, such as [CLS]
    after: tuple[int, ...]  # what every text ends with, such as [SEP]
    pad_id: int
    mask_id: int | None
    special_ids: tuple[int, ...]
    continuation: np.ndarray  # bool [size]; True where a token continues a word
    spelled_only: int = 0  # how many of the last ids a text has only where it spells their token out
    spelled_out: SpelledOut | None = None  # how a model that has no rows for these ids reads them

    @property
    def rows_needed(self) -> int:
        """The rows that a model's token table must have (`rows_needed`)."""
        return self.size - self.spelled_only

    @property
    def frame_length(self) -> int:
        """Tokens that the frame adds to a text."""
        return len(self.before) + len(self.after)


@dataclass(frozen=True, eq=False)
class SpelledOut:
    """How a model reads special tokens for which its token table has no rows: as the ordinary ids of their spelling.

    The text around such a token is tokenized on its own, as it is around every special token, so ids that are in shards
    can be replaced as well as those of a text.
    """

    rows: int  # of the table
    ids: Mapping[int, np.ndarray]  # int32 [k], k ≥ 1, of each token without a row

    @classmethod
    def of(cls, tokenizer: Any, rows: int) -> SpelledOut | None:
        """For a table that has the rows that the tokenizer needs (`rows_needed`); None if every token has a row.

        The tokenizer must be a fast one.
        """
        missing = {index: str(added) for index, added in tokenizer.added_tokens_decoder.items() if index >= rows}
        if not missing:
            return None
        from tokenizers import Tokenizer

        # A copy, because the setting would change what the tokenizer does elsewhere.
        backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True
        ids: dict[int, np.ndarray] = {}
        for index, token in sorted(missing.items()):
            ids[index] = np.asarray(backend.encode(token, add_special_tokens=False).ids, dtype=np.int32)
            if not len(ids[index]) or ids[index].max() >= rows:
                raise DataError(
                    f"tokenizer {tokenizer.name_or_path!r} has the special token {token!r}, for which the model's "
                    f"{rows} token embeddings have no row, and does not know its characters as ordinary text; remove "
                    "the token from the tokenizer, or give the model a row for it"
                )
        return cls(rows, ids)

    def replace(self, tokens: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Flat texts (ids [T], offsets int64 [n + 1]) with all ids below `rows`; they may be longer than before."""
        places = np.flatnonzero(tokens >= self.rows)
        if not len(places):
            return tokens, offsets
        spelled = [self.ids[index] for index in tokens[places].tolist()]
        counts = np.ones(len(tokens), dtype=np.int64)  # ids that each id becomes
        counts[places] = [len(ids) for ids in spelled]
        starts = np.concatenate(([0], np.cumsum(counts)))
        replaced = np.repeat(tokens, counts)
        for place, ids in zip(places.tolist(), spelled):
            replaced[starts[place] : starts[place + 1]] = ids
        return replaced, starts[offsets]

    def check_prompt(self, tokenizer: Any, prompt: str) -> None:
        """Refuse a prompt with such a token: its length would not be the one that a pooling leaves out."""
        for index in _ids_alone(tokenizer, prompt):
            if index in self.ids:
                raise DataError(
                    f"prompt {prompt!r} has the special token {tokenizer.convert_ids_to_tokens(index)!r}, for which "
                    f"the model's {self.rows} token embeddings have no row; write the prompt without it"
                )


def frame_of(tokenizer: PreTrainedTokenizerFast) -> Frame:
    """What a fast tokenizer puts before and after a text.

    Raises DataError if its post-processor changes the text itself, or adds ids that the tokenizer does not have.
    """
    _require_fast(tokenizer)
    from tokenizers import Tokenizer, models

    # The post-processor holds the ids that it adds. It is tried in a tokenizer of one token, so that neither this
    # tokenizer's truncation and padding nor its normaliser play a part.
    text_id = LARGEST_ID + 1
    alone = Tokenizer(models.WordLevel({_ANY_TEXT: text_id}, unk_token=_ANY_TEXT))
    if (processor := tokenizer.backend_tokenizer.post_processor) is not None:
        alone.post_processor = processor
    ids = alone.encode(_ANY_TEXT).ids
    where = ids.index(text_id) if text_id in ids else 0
    before, after = tuple(ids[:where]), tuple(ids[where + 1 :])
    if ids.count(text_id) != 1 or max((*before, *after), default=-1) > max(tokenizer.get_vocab().values(), default=-1):
        raise DataError(
            f"the post-processor of tokenizer {tokenizer.name_or_path!r} does more than to put tokens of its "
            "vocabulary before and after a text; give the tokenizer a TemplateProcessing"
        )
    return Frame(before, after)


def vocabulary_of(tokenizer: PreTrainedTokenizerFast) -> Vocabulary:
    """The vocabulary of a fast tokenizer."""
    before, after = frame_of(tokenizer)
    pad_id = pad_id_of(tokenizer)
    ids = tokenizer.get_vocab()
    if max(ids.values(), default=0) > LARGEST_ID:
        raise DataError(
            f"tokenizer {tokenizer.name_or_path!r} has the id {max(ids.values())}; ids beyond {LARGEST_ID} are not "
            "supported"
        )
    # Tokens that were added by hand may leave gaps between ids, so the largest id counts, too.
    size = max(len(tokenizer), max(ids.values()) + 1)
    special_ids = special_ids_of(tokenizer)
    continuation = np.zeros(size, dtype=bool)
    starts_word = _word_start_rule(json.loads(tokenizer.backend_tokenizer.to_str()))
    added = set(tokenizer.get_added_vocab().values())
    for token, index in ids.items():
        continuation[index] = index not in added and not starts_word(token)
    continuation[list(special_ids)] = False
    continuation.setflags(write=False)
    spelled_only = size - rows_needed(tokenizer)
    return Vocabulary(size, before, after, pad_id, tokenizer.mask_token_id, special_ids, continuation, spelled_only)


def rows_needed(tokenizer: PreTrainedTokenizerFast) -> int:
    """The rows that a model's token table must have: one for each id up to the largest that texts get.

    The largest id counts and not the number of tokens, because tokens that were added by hand may leave gaps between
    ids. Special tokens that no text gets by itself are left out, because some models have no rows for them:
    EmbeddingGemma embeds texts alone, and the tokenizer of its family also has a token for images.
    """
    needed = {*chain(*frame_of(tokenizer)), tokenizer.unk_token_id, tokenizer.mask_token_id, _padding(tokenizer)}
    return max(set(tokenizer.get_vocab().values()) - (_added_special_ids(tokenizer) - needed), default=-1) + 1


def special_ids_of(tokenizer: PreTrainedTokenizerFast) -> tuple[int, ...]:
    """The ids that are no part of the language, rising: of the frame, of tokens with a role such as padding or the mask
    (the unknown token's is one), and of every token that was added as a special one.

    A tokenizer may have special tokens without a role, such as Llama 3's reserved ones.
    """
    roles = map(int, tokenizer.all_special_ids)
    return tuple(sorted({*roles, *_added_special_ids(tokenizer), *chain(*frame_of(tokenizer))}))


def ids_beside_text(tokenizer: PreTrainedTokenizerFast) -> tuple[int, ...]:
    """The ids that do not count in a mean of a text's tokens, rising: the special ones without the unknown token.

    The unknown token stands for a part of the text, unless it has another role, too: byte-level BPE knows every text,
    and GPT-2 gives that name to its end of text.
    """
    roles = [
        *(tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.sep_token_id, tokenizer.cls_token_id),
        *(tokenizer.pad_token_id, tokenizer.mask_token_id, *chain(*frame_of(tokenizer))),
    ]
    unknown = tokenizer.unk_token_id
    return tuple(index for index in special_ids_of(tokenizer) if index != unknown or index in roles)


def used_ids(tokenizer: PreTrainedTokenizerFast) -> tuple[int, ...]:
    """The ids that texts consist of, rising: neither special (the unknown token counts as text) nor unused.

    Unused are ids without a token, and the places that vocabularies keep free under names such as [unused12].
    """
    beside = set(ids_beside_text(tokenizer))
    ids = {index for token, index in tokenizer.get_vocab().items() if not _FREE_PLACE.fullmatch(token)}
    return tuple(sorted(ids - beside))


def _added_special_ids(tokenizer: PreTrainedTokenizerFast) -> set[int]:
    return {index for index, added in tokenizer.added_tokens_decoder.items() if added.special}


def pad_id_of(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id with which texts are padded: the tokenizer's own or, if it has none (Llama 3), that of a closing token.

    Nothing reads what stands at padding, so any id would do. Raises DataError if the tokenizer has no such token.
    """
    if (pad_id := _padding(tokenizer)) is None:
        raise DataError(
            f"tokenizer {tokenizer.name_or_path!r} has no padding token; add pad_token to its tokenizer_config.json"
        )
    return pad_id


def _padding(tokenizer: PreTrainedTokenizerBase) -> int | None:
    named = _first(tokenizer.pad_token_id, tokenizer.sep_token_id, tokenizer.eos_token_id)
    if named is not None:
        return named
    before, after = frame_of(cast("PreTrainedTokenizerFast", tokenizer))
    return _first(*after[-1:], *before[:1])


def append_token(tokenizer: PreTrainedTokenizerFast, token: str) -> None:
    """Make a tokenizer put a special token after every text, behind what it puts there already; changed in place.

    The token stands in the post-processor, so it is added after truncation wherever the tokenizer is used. A pair of
    texts, which nothing here reads, has the frame around each of the two.
    """
    before, after = frame_of(tokenizer)
    index = tokenizer.get_vocab().get(token)
    special = special_ids_of(tokenizer)
    if index not in special:
        names = ", ".join(map(str, tokenizer.convert_ids_to_tokens(list(special))[:9]))
        what = "not in the vocabulary" if index is None else "an ordinary token, which texts hold too,"
        raise DataError(
            f"token {token!r} is {what} of tokenizer {tokenizer.name_or_path!r}; append one of its special tokens, "
            f"such as {names}"
        )
    if after[-1:] == (index,):
        raise DataError(
            f"tokenizer {tokenizer.name_or_path!r} ends every text with {token!r} already; do not append it"
        )
    from tokenizers import Tokenizer, models

    opening, closing = (tokenizer.convert_ids_to_tokens(list(ids)) for ids in (before, (*after, index)))

    def pieces(text: str, kind: int) -> list[dict[str, Any]]:
        first, last = ([{"SpecialToken": {"id": each, "type_id": kind}} for each in ids] for ids in (opening, closing))
        return [*first, {"Sequence": {"id": text, "type_id": kind}}, *last]

    framing = {
        "type": "TemplateProcessing",
        "single": pieces("A", 0),
        "pair": [*pieces("A", 0), *pieces("B", 1)],
        "special_tokens": {
            name: {"id": name, "ids": [number], "tokens": [name]}
            for name, number in zip([*opening, *closing], [*before, *after, index])
        },
    }
    processor = json.loads(tokenizer.backend_tokenizer.to_str())["post_processor"]
    kept = [each for each in _steps(processor) if each["type"] == "ByteLevel"]  # which adds nothing
    # The library makes a post-processor from JSON only as a part of a tokenizer.
    carrier = json.loads(Tokenizer(models.BPE()).to_str())
    carrier["post_processor"] = {"type": "Sequence", "processors": [*kept, framing]} if kept else framing
    tokenizer.backend_tokenizer.post_processor = Tokenizer.from_str(json.dumps(carrier)).post_processor
    assert frame_of(tokenizer) == Frame(before, (*after, index))


def _steps(processor: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The post-processors of a tokenizer's JSON, those of sequences one by one."""
    if processor is None:
        return []
    if processor["type"] != "Sequence":
        return [processor]
    return [step for each in processor["processors"] for step in _steps(each)]


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerFast) -> str:
    """sha256 of everything that decides which ids a text gets, its frame included; equal after saving and loading."""
    return _digest_without(tokenizer, "truncation", "padding")


def ids_fingerprint(tokenizer: PreTrainedTokenizerFast) -> str:
    """sha256 of everything that decides which ids a text gets within its frame."""
    return _digest_without(tokenizer, "truncation", "padding", "post_processor")


def _digest_without(tokenizer: PreTrainedTokenizerFast, *parts: str) -> str:
    _require_fast(tokenizer)
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    for part in parts:
        content.pop(part, None)
    return hashlib.sha256(json.dumps(content, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def load_tokenizer(name_or_folder: str | Path) -> PreTrainedTokenizerFast:
    """Load a fast tokenizer from a folder or by its name on the hub.

    If it has no padding token, its closing token becomes one (`pad_id_of`). Runs and exports save it so, because
    sentence-transformers cannot pad without one.
    """
    name = str(name_or_folder)
    folder = Path(name).expanduser()
    with reading(folder, what="tokenizer folder", hint=_SAVE_AGAIN):
        is_folder = folder.is_dir()
        if folder.is_file():
            raise DataError(f"tokenizer {name} is a file; give the folder that holds its tokenizer.json")
        if is_folder:
            folder = transformer_folder(folder)
        if is_folder and not any((folder / file).is_file() for file in ("tokenizer.json", "vocab.txt", "vocab.json")):
            raise DataError(
                f"tokenizer folder {name} holds no tokenizer.json; give a folder written by save_pretrained"
            )
        for path in folder.iterdir() if is_folder else ():
            if path.exists() and not (path.is_file() or path.is_dir()):
                # Reading a pipe would wait forever.
                raise DataError(f"tokenizer folder {name}: {path.name} is no regular file; {_SAVE_AGAIN}")
    if not is_folder and (isinstance(name_or_folder, Path) or name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise DataError(f"tokenizer folder {name} does not exist; give an existing folder or a hub name")

    from transformers import AutoTokenizer

    tokenizer: Any
    try:
        # A tokenizer is data: code in its folder is not run, and the user is not asked about it on the terminal.
        tokenizer = AutoTokenizer.from_pretrained(str(folder) if is_folder else name, trust_remote_code=False)
    except Exception as error:  # the Rust side raises bare Exceptions for damaged files
        if "trust_remote_code" in str(error):
            raise DataError(
                f"tokenizer {name} asks for code of its own (auto_map in its configuration), which is never run; save "
                "it as a tokenizer.json of a class that transformers knows"
            ) from error
        if is_folder:
            raise DataError(f"tokenizer folder {name} cannot be read ({first_line(error)}); {_SAVE_AGAIN}") from error
        raise DataError(
            f"tokenizer {name!r} is neither a folder nor available from the Hugging Face hub or its local cache; "
            "give a folder, or download it first on a machine with network access"
        ) from error
    _require_fast(tokenizer)
    # The token must be an added one: as a padding token, another would become that, and texts would get other ids.
    if tokenizer.pad_token_id is None and (closing := _padding(tokenizer)) in tokenizer.added_tokens_decoder:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(closing)
    return tokenizer


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a tokenizer's files. The library reports an error of the operating system as an exception of its own."""
    with refused_by("the tokenizers library", f"writing {folder}", hint="free some space there, or name another place"):
        tokenizer.save_pretrained(str(folder))


def prompt_ids(tokenizer: PreTrainedTokenizerFast, prompt: str) -> np.ndarray:
    """The ids that a prompt adds before a text's own ids, without special tokens: int64 [p].

    WordPiece drops the space at a prompt's end and splits at every punctuation mark, so a prompt that ends in a space
    or a mark gives the ids of the joined text. SentencePiece tokenizes the first word of a text as if a space stood
    before it, which agrees with a prompt that ends in a space. Byte-level BPE makes such a space a part of the next
    word, whose ids then differ: the prompt is refused.
    """
    _require_fast(tokenizer)

    def ids(text: str) -> list[int]:
        return tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids

    found = set()
    for text in TEXT_BEGINNINGS if prompt else ():
        own, joined = ids(text), ids(prompt + text)
        found.add(tuple(joined[: -len(own)]) if joined[-len(own) :] == own else None)
    # A letter or digit at the prompt's end joins the next word, even if the tested words happen to be cut there.
    if prompt[-1:].isalnum() or None in found or len(found) > 1 or (found == {()} and prompt.strip()):
        raise DataError(
            f"prompt {prompt!r} runs into the first word of a text with tokenizer {tokenizer.name_or_path!r}; "
            "end it in ': ', ':' or a line break, whichever this tokenizer keeps apart, or prepare the texts with it "
            "(python -m data.prepare tuples --query-prompt, --passage-prompt)"
        )
    return np.asarray(next(iter(found), ()), dtype=np.int64)


def prompt_length(tokenizer: PreTrainedTokenizerFast, prompt: str) -> int:
    """The tokens at a text's beginning that a pooling without the prompt leaves out; 0 without a prompt.

    They are counted as sentence-transformers counts them (include_prompt = false): the tokens of the prompt alone and
    those that the tokenizer puts before a text. `left_out_length` refuses prompts of which this is not right.
    """
    if not prompt:
        return 0
    before, _ = frame_of(tokenizer)
    return len(before) + len(_ids_alone(tokenizer, prompt))


def left_out_length(tokenizer: Any, prompt: str) -> int:
    """`prompt_length` of a prompt that a pooling leaves out. The tokenizer must be a fast one.

    Raises DataError where these would not be the prompt's tokens or sentence-transformers would count others, because
    an export would then give other vectors. It takes the tokens of the prompt alone, less one if the last is special:
    - A space at the prompt's end may be a token alone and, in a text, the beginning of the first word's token, which
      would be left out, too.
    - A closing token that the tokenizer's configuration does not name is counted, and of two only one is not counted; a
      prompt's own last token is not counted if it is special and no token closes a text.
    """
    length = prompt_length(tokenizer, prompt)
    if not prompt:
        return length
    alone = _ids_alone(tokenizer, prompt)
    if any(_ids_alone(tokenizer, prompt + text)[: len(alone)] != alone for text in TEXT_BEGINNINGS):
        raise DataError(
            f"prompt {prompt!r} cannot be left out of the pooling with tokenizer {tokenizer.name_or_path!r}, which "
            "makes its end a part of the text's first token; end it in another way, such as ':' or a line break"
        )
    framed = tokenizer(prompt, add_special_tokens=True, truncation=False, padding=False)["input_ids"]
    theirs = len(framed) - (framed[-1] in tokenizer.all_special_ids)
    if theirs != length:
        raise DataError(
            f"prompt {prompt!r} cannot be left out of the pooling with tokenizer {tokenizer.name_or_path!r}: of its "
            f"{length} tokens, sentence-transformers would leave out {theirs}; end texts with one token, which the "
            "tokenizer names as its eos_token or sep_token, and the prompt with an ordinary one"
        )
    return length


def _ids_alone(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """The ids of a text without special tokens, whatever truncation and padding earlier calls have left behind."""
    return list(tokenizer(text, add_special_tokens=False, truncation=False, padding=False)["input_ids"])


def _require_fast(tokenizer: Any) -> None:
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise DataError(
            f"tokenizer {getattr(tokenizer, 'name_or_path', tokenizer)!r} has no fast (Rust) version; "
            "convert it to a tokenizer.json"
        )


def _word_start_rule(backend: dict[str, Any]) -> Any:
    """The function that says whether a token starts a word, from the tokenizer's JSON."""
    model = backend["model"]
    if model["type"] == "WordPiece":
        prefix = model.get("continuing_subword_prefix") or "##"
        return lambda token: not (token.startswith(prefix) and len(token) > len(prefix))
    if model["type"] == "WordLevel":
        return lambda token: True
    # Both marks may be anywhere inside a sequence of pre-tokenizers, or in the normalizer ("Prepend"/"Replace").
    layout = json.dumps([backend.get("pre_tokenizer"), backend.get("normalizer"), backend.get("decoder")])
    if '"ByteLevel"' in layout:
        return lambda token: token.startswith(BYTE_LEVEL_SPACES)
    return lambda token: token.startswith("▁")


def _first(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)
