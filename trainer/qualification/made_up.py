"""A small made-up data set: words without meaning, of which a text's topic makes some more frequent.

It is the same on every machine, so that figures of several can be compared, and needs no download.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from data.shards.writer import SplitWriter, finish_folder
from trainer.qualification.settings import SEED, Scale

_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_TOPICS = 50
# Samples of each folder: several batches of every scale.
_SAMPLES = 256


def write(folder: Path, scale: Scale) -> Path:
    """Write folder/documents and folder/tuples for a scale; returns the folder."""
    tokenizer = _tokenizer(scale.vocabulary)
    random = np.random.Generator(np.random.Philox(SEED))
    longest = scale.length - 2  # the frame's two tokens

    def text(topic: int, most: int) -> np.ndarray:
        """Token ids of a text of a quarter of `most` tokens to all of them; a half of its words are the topic's."""
        words = scale.vocabulary - len(_SPECIAL)
        count = int(random.integers(max(2, most // 4), most + 1))
        of_topic = (topic * 31 + random.integers(0, max(2, words // _TOPICS), count)) % words
        any_word = (words * random.random(count) ** 3).astype(np.int64)  # the first ones are the most frequent
        return len(_SPECIAL) + np.where(random.random(count) < 0.5, of_topic, any_word)

    with SplitWriter(folder / "documents", 0, kind="documents", vocabulary_size=scale.vocabulary) as documents:
        for sample in range(_SAMPLES):
            documents.add_document(text(sample % _TOPICS, longest))
    finish_folder(folder / "documents", 1, tokenizer=tokenizer)
    with SplitWriter(folder / "tuples", 0, kind="tuples", vocabulary_size=scale.vocabulary) as tuples:
        for sample in range(_SAMPLES):
            topic = sample % _TOPICS
            passages = [text(topic, longest), text(topic + 1, longest)]
            tuples.add_tuple(text(topic, longest // 2), passages)
    finish_folder(folder / "tuples", 1, tokenizer=tokenizer)
    return folder


def _tokenizer(vocabulary: int):  # type: ignore[no-untyped-def]  # transformers is imported inside
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = [*_SPECIAL, *(f"w{number}" for number in range(vocabulary - len(_SPECIAL)))]
    ids = {word: number for number, word in enumerate(words)}
    backend = Tokenizer(models.WordPiece(vocab=ids, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    frame = [(name, ids[name]) for name in ("[CLS]", "[SEP]")]
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=frame
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, **{f"{token.strip('[]').lower()}_token": token for token in _SPECIAL}
    )
