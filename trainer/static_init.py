"""Command: make a token table from a trained encoder, from which a static embedding starts.

    python -m trainer.static_init --model runs/x/model --output runs/static_start --from outputs --dim 256

`--from tokens` takes the encoder's own token embeddings. `--from outputs` distils the encoder: each token goes through
it as a text of its own, and the output is the token's vector. Either table is then rotated to its principal components,
so that prefixes of its columns hold most of the variance, and weighted by Zipf's law with smooth inverse frequency
(SIF, Arora et al. 2017): tokenizers list frequent tokens first, so a token of rank r is taken to occur with probability
p = (1/r) / Σ 1/r', and its vector is multiplied by a / (a + p). Frequent words then weigh little in a mean. Special
and unused tokens have no rank and take no part in the components: 994 of the first 999 ids of BERT's vocabulary are
places that it keeps free. Only WordPiece vocabularies like BERT's are certain to have that order; `--sif 0` leaves the
weighting out.
The result is a folder for `model.source`, whose tokenizer is the encoder's own.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers.utils import logging as hf_logging

from data.ground.command import exit_code_of, log_to_stderr
from data.ground.errors import ConfigError
from data.ground.options import Parser, count, real
from data.ground.whole_folder import check_place, written_whole
from data.tokens import Frame, frame_of, ids_beside_text, tokenizer_fingerprint, used_ids
from models.encoder import Encoder
from models.settings import EmbeddingSettings
from models.sizes import Size
from models.static_embedding import StaticConfig, StaticModel
from trainer.evaluation.subject import load_model

log = logging.getLogger(__name__)

TOKENS_PER_PASS = 1024


@torch.no_grad()
def token_outputs(encoder: Encoder, vocabulary_size: int, frame: Frame) -> Tensor:
    """The encoder's full-size embedding of each token as a text of its own: float32 [vocabulary_size, dim]."""
    full = Size(encoder.num_layers, encoder.embedding_size)
    before, after = (torch.tensor(ids, dtype=torch.int64) for ids in frame)
    parts = []
    for start in range(0, vocabulary_size, TOKENS_PER_PASS):
        tokens = torch.arange(start, min(start + TOKENS_PER_PASS, vocabulary_size))
        framing = [ids.expand(len(tokens), -1) for ids in (before, after)]
        texts = torch.cat([framing[0], tokens[:, None], framing[1]], dim=1)
        no_prompts = torch.zeros(len(texts), dtype=torch.int64)
        parts.append(encoder(texts, torch.ones_like(texts), (full,), prompt_lengths=no_prompts)[0].float())
    return torch.cat(parts)


def principal_components(vectors: Tensor, dim: int) -> Tensor:
    """Rows [n, d] less their mean, in their `dim` strongest directions, strongest first: [n, dim]."""
    centred = vectors.double() - vectors.double().mean(0)
    _, directions = torch.linalg.eigh(centred.T @ centred)  # ascending
    return (centred @ directions.flip(1)[:, :dim]).to(vectors.dtype)


def sif_weights(count: int, *, sif: float) -> Tensor:
    """a / (a + p) of the tokens in the order of their frequency, p by Zipf's law: float32 [count]."""
    shares = 1.0 / torch.arange(1, count + 1, dtype=torch.float64)
    return (sif / (sif + shares / shares.sum())).float()


def table_of(vectors: Tensor, *, dim: int, sif: float, used: Sequence[int]) -> Tensor:
    """Token vectors [V, d] as a table [V, dim]. The components are of the ids `used`, which rise; other rows are 0."""
    if not 1 <= dim <= vectors.shape[1]:
        raise ConfigError(
            f"--dim {dim} is not among the {vectors.shape[1]} dimensions of the encoder; choose that or fewer"
        )
    texts = torch.tensor(used, dtype=torch.int64)
    table = torch.zeros(len(vectors), dim)
    rotated = principal_components(vectors[texts], dim)
    table[texts] = rotated * sif_weights(len(rotated), sif=sif)[:, None] if sif else rotated
    return table


def make_start(model: str, output: Path, *, source: str, dim: int, sif: float) -> Path:
    """Write the folder; `source`: tokens | outputs. dim 0: the encoder's own."""
    check_place(output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"--output {output} is not empty; give a new folder")
    if not 0 <= sif < math.inf:
        raise ConfigError(f"--sif {sif} is below 0; give 0 for no weighting, or a number such as 1e-4")
    # A decoder may not say how it pools, which has no part in its token embeddings.
    encoder, tokenizer, own = load_model(model, pooling="mean" if source == "tokens" else None)
    encoder.eval()
    if encoder.is_static:
        raise ConfigError(f"{model} is a static encoder already; name it in model.source as it is")
    # The table has a row for each id up to the largest, because tokens that were added by hand may leave gaps between
    # ids. The encoder may have no rows for the last ids (data.tokens.rows_needed); the table then has zeros there.
    rows, frame = max(tokenizer.get_vocab().values()) + 1, frame_of(tokenizer)
    known = min(rows, encoder.word_embeddings.num_embeddings)
    if source == "tokens":
        vectors = encoder.word_embeddings.weight.detach()[:known].float()
    else:
        vectors = token_outputs(encoder, known, frame)
    used = [index for index in used_ids(tokenizer) if index < known]
    table = table_of(vectors, dim=dim or vectors.shape[1], sif=sif, used=used)
    table = torch.nn.functional.pad(table, (0, 0, 0, rows - known))
    ignored = ids_beside_text(tokenizer)
    static = StaticModel(StaticConfig(vocab_size=rows, hidden_size=table.shape[1], special_ids=ignored))
    with torch.no_grad():
        static.embedding.weight.copy_(table)
    lengths = {} if own is None else {k: getattr(own, k) for k in ("query_max_length", "passage_max_length")}
    ladder, fingerprint = ((1, table.shape[1]),), tokenizer_fingerprint(tokenizer)
    settings = EmbeddingSettings(pooling="mean", ladder=ladder, tokenizer=fingerprint, **lengths)
    with written_whole(output) as partial:
        static.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        settings.save(partial)
    log.info("a table of %d tokens × %d dimensions is in %s", *table.shape, output)
    return output


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="python -m trainer.static_init", description="Make a token table of a trained encoder, for model.source."
    )
    add = parser.add_argument
    add("--model", required=True, help="the encoder: a folder or a hub name")
    add("--output", required=True, type=Path, help="a new folder")
    add(
        "--from",
        dest="source",
        choices=("tokens", "outputs"),
        default="outputs",
        help="tokens: its token embeddings; outputs: what it makes of each token alone (%(default)s)",
    )
    add("--dim", type=count(least=0), default=0, help="principal components kept (0: all)")
    add("--sif", type=real(least=0), default=1e-4, help="a of the weight a / (a + p); 0: no weighting (%(default)s)")
    args = parser.parse_args(argv)
    log_to_stderr()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    return exit_code_of(lambda: make_start(args.model, args.output, source=args.source, dim=args.dim, sif=args.sif))


if __name__ == "__main__":
    sys.exit(main())
