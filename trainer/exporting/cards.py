"""README.md of each folder of an export: the hub's front matter, the size, how to use it, its training and results.

The front matter has the fields by which the hub finds a model and shows its scores: library, task, tags, base model,
and the results as `model-index`, under the names that sentence-transformers' own cards use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from huggingface_hub import EvalResult, ModelCardData
from transformers import PreTrainedTokenizerFast

from models.settings import EmbeddingSettings
from models.sizes import Size
from trainer.evaluation.results.report import METRIC_LABELS, markdown_table
from trainer.exporting.folders import Cut
from trainer.exporting.model_card import Score
from trainer.exporting.onnx_files import FOLDER, Check

_TASKS = {
    "sts": ("semantic-similarity", "Semantic Similarity"),
    "retrieval": ("information-retrieval", "Information Retrieval"),
}
_METRIC_TYPES = {
    "spearman": "spearman_{similarity}",
    "ndcg_cut_10": "{similarity}_ndcg@10",
    "recip_rank_10": "{similarity}_mrr@10",
    "recall_100": "{similarity}_recall@100",
}
_USAGE = """## Use

```python
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("path/to/this/folder")
queries = model.encode_query(["what is an espresso?"])
documents = model.encode_document(["Espresso is coffee brewed under pressure."])
print(model.similarity(queries, documents))
```
"""


def size_card(
    cut: Cut,
    name: str,
    *,
    base_model: str | None,
    scores: Sequence[Score],
    checks: Mapping[str, Check],
    weights: str,
) -> str:
    """The card of one size of an encoder with layers."""
    size, settings = cut.size, cut.settings
    layers = f"{size.layers} layers" if size.layers > 1 else "layer"
    family = cut.backbone.config.model_type
    rows = [
        ("layers", size.layers),
        *([] if size.has_whole_feed_forwards else [("feed-forward", f"{size.feed_forward:g} of the whole encoder's")]),
        ("embedding dimensions", f"{size.dim} ({_kind(settings)})"),
        *_cuts(cut.widths),
        ("parameters", f"{cut.parameters:,}"),
        ("weights", weights),
        ("architecture", ", ".join(filter(None, (family, settings.direction, _pooling(settings))))),
        *_lengths(settings),
    ]
    return (
        _front_matter(["starbucks", *(["onnx"] if checks else [])], name, settings, base_model, scores)
        + f"# Text embeddings, size {_title(name, size)}\n\n"
        f"One of the sizes of a two-dimensional Matryoshka embedding model: the first {layers} and the\n"
        f"first {size.dim} dimensions of one encoder that was trained to work at every size{_head(cut)}.\n"
        f"{_neurons(size)}\n"
        + _table(rows)
        + "\n"
        + _USAGE
        + _dimensions_section(cut.widths, settings)
        + _onnx_section(checks, settings)
    )


def static_card(
    tokens: str,
    tokenizer: PreTrainedTokenizerFast,
    settings: EmbeddingSettings,
    name: str,
    size: Size,
    *,
    base_model: str | None,
    scores: Sequence[Score],
) -> str:
    """The card of one width of a token table."""
    rows = [
        ("embedding dimensions", f"{size.dim} ({_kind(settings)})"),
        ("tokens in the table", tokens),
        ("longest text", f"{tokenizer.model_max_length - tokenizer.num_special_tokens_to_add()} tokens"),
    ]
    return (
        _front_matter(["static-embeddings"], name, settings, base_model, scores)
        + f"# Static text embeddings, size {name} ({size.dim} dimensions)\n\n"
        "The mean of a text's token vectors, from a table whose every prefix of columns was trained to work on its own."
        "\n\n" + _table(rows) + "\n" + _USAGE
    )


def router_card(
    query: Cut,
    document: Cut,
    name: str,
    *,
    base_model: str | None,
    checks: Mapping[str, Mapping[str, Check]],
    weights: str,
) -> str:
    """The card of a folder with one size for queries and one for documents. checks: route -> precision -> check."""
    settings = query.settings
    rows = [
        ("queries", f"{query.size}, at most {settings.query_max_length} tokens, {query.parameters:,} parameters"),
        (
            "documents",
            f"{document.size}, at most {settings.passage_max_length} tokens, {document.parameters:,} parameters",
        ),
        ("embedding dimensions", f"{query.size.dim} ({_kind(settings)})"),
        ("weights", weights),
    ]
    sections = [
        _onnx_section(of_route, settings, folder=f"{route}_0_Transformer", title=f"ONNX, {route} route")
        for route, of_route in checks.items()
    ]
    return (
        _front_matter(["starbucks", "router", *(["onnx"] if any(checks.values()) else [])], name, settings, base_model)
        + f"# Text embeddings, queries of {query.size} and documents of {document.size}\n\n"
        f"Two sizes of one two-dimensional Matryoshka embedding model, whose vectors share one space: `encode_query` "
        f"runs\n{_runs(query.size)} and `encode_document` {_runs(document.size, first=False)}.\n\n"
        + _table(rows)
        + "\n"
        + _USAGE
        + "\n`encode` without a task encodes documents. A Router needs sentence-transformers 5.0 or newer.\n"
        + "".join(sections)
    )


def _neurons(size: Size) -> str:
    if size.has_whole_feed_forwards:
        return ""
    return f"Of every feed-forward it has the first {size.feed_forward:g} of the neurons.\n"


def _runs(size: Size, *, first: bool = True) -> str:
    """The layers of a router's side, and the part of their feed-forwards."""
    part = "" if size.has_whole_feed_forwards else f" with {size.feed_forward:g} of their feed-forwards"
    return f"{size.layers}{' of its layers' * first}{part}"


def _title(name: str, size: Size) -> str:
    return f"{name} ({size})" if name != str(size) else name


def _head(cut: Cut) -> str:
    linear = cut.projection is not None and cut.projection.bias is not None
    return ", through a linear\nhead of this depth" if linear else ""


def _kind(settings: EmbeddingSettings) -> str:
    cosine = settings.similarity == "cosine"
    return "unit vectors, compared by cosine" if cosine else "compared by dot product"


def _cuts(widths: Sequence[int]) -> list[tuple[str, str]]:
    return [("may be cut to", ", ".join(map(str, widths[:-1])))] if len(widths) > 1 else []


def _pooling(settings: EmbeddingSettings) -> str:
    return f"{settings.pooling} pooling" + ("" if settings.pool_prompt else " without the prompt's tokens")


def _lengths(settings: EmbeddingSettings) -> list[tuple[str, str]]:
    query, passage = settings.query_max_length, settings.passage_max_length
    return [
        ("longest text", f"{settings.max_length} tokens"),
        ("trained with", f"queries of {query} tokens, passages of {passage}"),
    ]


def _table(rows: Sequence[tuple[str, object]]) -> str:
    return "| | |\n| --- | --- |\n" + "".join(f"| {key} | {value} |\n" for key, value in rows)


def _front_matter(
    tags: Sequence[str],
    name: str,
    settings: EmbeddingSettings,
    base_model: str | None,
    scores: Sequence[Score] = (),
) -> str:
    results = [
        EvalResult(
            task_type=_TASKS[score.kind][0],
            task_name=_TASKS[score.kind][1],
            dataset_type=score.task,
            dataset_name=score.task,
            metric_type=_METRIC_TYPES[score.metric].format(similarity=settings.similarity),
            metric_name=METRIC_LABELS[score.metric],
            metric_value=round(score.value, 4),
        )
        for score in scores
        if score.value is not None
    ]
    data = ModelCardData(
        library_name="sentence-transformers",
        pipeline_tag="sentence-similarity",
        tags=["sentence-transformers", "feature-extraction", "matryoshka", *tags],
        base_model=base_model,
        model_name=f"{base_model.rpartition('/')[2]} {name}" if base_model else name,
        eval_results=results or None,
    )
    return f"---\n{data.to_yaml()}\n---\n"


def _dimensions_section(widths: Sequence[int], settings: EmbeddingSettings) -> str:
    if len(widths) == 1:
        return ""
    normalise = ", normalize_embeddings=True" if settings.similarity == "cosine" else ""
    return f"""
### Fewer dimensions

A prefix of a vector is an embedding of its own, at the cost of all the layers. Here that of {widths[-2]}:

```python
vectors = model.encode(["what is an espresso?"], truncate_dim={widths[-2]}{normalise})
```

vLLM takes `"dimensions": {widths[-2]}` in a request, since config.json names the widths.
"""


def _onnx_section(
    checks: Mapping[str, Check], settings: EmbeddingSettings, *, folder: str = "", title: str = "ONNX"
) -> str:
    if not checks:
        return ""
    place = f"{folder}/{FOLDER}" if folder else FOLDER
    rows = [
        [
            f"{place}/{check.file}",
            f"{check.megabytes:.1f}",
            f"{check.largest_difference:.1e}",
            f"{check.least_cosine:.4f}",
            f"{check.onnx_milliseconds:.2f}",
            f"{check.torch_milliseconds:.2f}",
        ]
        for check in checks.values()
    ]
    head = ["file", "MB", "largest difference", "least cosine", "ms a query", "ms with torch"]
    first = next(iter(checks.values())).file
    prompt = settings.passage_prompt if folder.startswith("document") else settings.query_prompt
    return f"""
## {title}

{markdown_table(head, rows)}
Each row compares a file's vectors with the vectors that torch computes from this folder's weights. The
milliseconds are for one short query on one thread of the machine that wrote the files; tokenizing is not included.

```python
import onnxruntime
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder{f"/{folder}" if folder else ""}")
session = onnxruntime.InferenceSession("path/to/this/folder/{place}/{first}")
texts = tokenizer([{prompt + "what is an espresso?"!r}], padding=True, truncation=True, return_tensors="np")
inputs = {{name: texts[name] for name in ("input_ids", "attention_mask")}}
(vectors,) = session.run(["sentence_embedding"], inputs)
```
{_backend(checks)}"""


def _backend(checks: Mapping[str, Check]) -> str:
    """How to load the files with sentence-transformers, which needs the package optimum-onnx for them."""
    files = [check.file for check in checks.values()]
    calls = [f'SentenceTransformer(folder, backend="onnx", model_kwargs={{"file_name": "{file}"}})' for file in files]
    return "\nOr, where optimum-onnx is installed:\n\n```python\n" + "\n".join(calls) + "\n```\n"
