"""The papers' formulas restated in plain PyTorch; every topology, ZeRO stage and micro-batch size must equal them.

The restatement has one process, the whole batch, full score matrices and full logits, autograd and torch's own AdamW.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModel

from data.collate import MaskedBatch, PairBatch, TextBatch
from data.keyed_random import derive_seed, mix64
from data.shards.reader import ShardFolder
from data.tokens import load_tokenizer
from models.backbone import final_norm
from models.sizes import Size
from tests.models.naive import naive_visibility
from tests.padding import pad_flat
from tests.trainer.support import recipe_of
from trainer.build import build_model, open_shards, open_stream
from trainer.config.schema import Recipe
from trainer.objectives.backward import micro_batches


def first_parameters(values: Mapping[str, Any]) -> dict[str, Tensor]:
    """The parameters before the first step, by name."""
    recipe = recipe_of(values)
    module = build_model(recipe, open_shards(recipe)).module
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def train_naively(
    values: Mapping[str, Any], *, steps: int, world_size: int = 1, module: nn.Module | None = None
) -> list[dict[str, Any]]:
    """The expected results of `steps` steps: per step a dict of loss, norm (before clipping) and parameters (after it).

    `world_size` only matters with dropout, whose draws are keyed by rank and micro-batch. `module` replaces the
    recipe's own module in tests that restate a part of the module too.
    """
    recipe = recipe_of(values)
    sources = open_shards(recipe)
    module = (module or build_model(recipe, sources).module).train()
    shares = [open_stream(recipe, sources, rank=rank, world_size=world_size) for rank in range(world_size)]
    optimizers = _naive_optimizers(module, recipe)
    naive: dict[str, Any] = {
        "masked": _naive_masked,
        "contrastive": _naive_contrastive,
        "distill": _naive_distillation,
    }
    loss_of = naive[recipe.objective.name]
    results = []
    for step in range(steps):
        loss = loss_of(module, [next(share) for share in shares], recipe, step)
        module.zero_grad()
        loss.backward()
        clipped = recipe.optim.max_grad_norm if recipe.optim.name == "adamw" else 0.0
        norm = nn.utils.clip_grad_norm_(module.parameters(), clipped or float("inf"))
        for optimizer in optimizers:
            optimizer.step()
        parameters = {name: p.detach().clone() for name, p in module.named_parameters()}
        results.append({"loss": loss.item(), "norm": float(norm), "parameters": parameters})
    return results


def plan_of(recipe: Recipe, step: int) -> tuple[list[Size], list[float], list[float]]:
    """Sizes, their loss weights and their KL weights as the papers define them, without size_schedules."""
    sizes = list(recipe.ladder)
    full = sizes[-1]
    kind = recipe.objective.sizes
    if kind == "full":
        return [full], [1.0], [0.0]
    if kind == "one":
        return [Size.parse(recipe.objective.size)], [1.0], [0.0]

    def by_layers(chosen: Sequence[Size]) -> list[float]:
        """`objective.layer_weighting`: 1, ESE's 1 / (1 + ln n) or 1 / n below the last layer, and 1 at it."""
        formulas = {"uniform": lambda n: 1.0, "log": lambda n: 1 / (1 + math.log(n)), "linear": lambda n: 1 / n}
        weighting = formulas[recipe.objective.layer_weighting]
        return [weighting(size.layers) if size.layers < full.layers else 1.0 for size in chosen]

    if kind == "two_d":
        # The schedule itself makes the draw; its statistics are tested elsewhere.
        from trainer.objectives.size_schedules import two_dimensional

        drawn = two_dimensional(recipe.ladder, seed=recipe.run.seed)(step).sizes[0]
        n, d = drawn.layers, drawn.dim
        four = [Size(n, d), Size(n, full.dim), Size(full.layers, d), full]
        return four, by_layers(four), [1.0, 1.0, 0.0, 0.0]
    if kind == "grid":
        sizes = list(dict.fromkeys(Size(deep.layers, wide.dim, deep.feed_forward) for deep in sizes for wide in sizes))
    elif kind == "mrl":
        sizes = [Size(full.layers, size.dim) for size in sizes]
    elif kind == "adaptive_layers":
        sizes = [Size(size.layers, full.dim, size.feed_forward) for size in sizes]
    elif kind.startswith("espresso"):
        widths = [size.dim for size in sizes]
        below = widths if kind == "espresso_full_width" else widths[:-1]
        sizes = [Size(n, d) for n in range(1, full.layers) for d in below] + [Size(full.layers, d) for d in widths]
        shares = [1.0 if size.layers == full.layers else 1 / (full.layers - 1) for size in sizes]
        weights = [share * falling for share, falling in zip(shares, by_layers(sizes))]
        return sizes, weights, [*shares[:-1], 0.0]
    weight = 1.0 / len(sizes) if recipe.objective.reduction == "mean" else 1.0
    factors = recipe.objective.size_weights or [1.0] * len(sizes)
    factors = [factor * falling for factor, falling in zip(factors, by_layers(sizes))]
    kl_factors = recipe.objective.kl_size_weights or [1.0] * (len(sizes) - 1)
    if recipe.objective.kl_teacher == "guide":
        factors_of_all = recipe.objective.kl_size_weights or [1.0] * len(sizes)
        factors_of_all = [factor * falling for factor, falling in zip(factors_of_all, by_layers(sizes))]
        return sizes, [weight * factor for factor in factors], [weight * factor for factor in factors_of_all]
    return sizes, [weight * factor for factor in factors], [weight * factor for factor in kl_factors] + [0.0]


def _naive_optimizers(module: nn.Module, recipe: Recipe) -> list[Any]:
    named = dict(module.named_parameters())
    if recipe.optim.name == "adamw":
        return [_naive_adamw(named, recipe)]
    matrices = {name: p for name, p in named.items() if p.ndim == 2 and "embeddings" not in name}
    others = {name: p for name, p in named.items() if name not in matrices}
    return [NaiveMuon(list(matrices.values()), recipe.optim), _naive_adamw(others, recipe)]


class NaiveMuon:
    """Keller Jordan's Muon (https://kellerjordan.github.io/posts/muon/), step by step, in float64 but for the state.

    The mean of the gradients is m = b m + (1 - b) g, Nesterov's look ahead u = (1 - b) g + b m, and the step is a
    polynomial of u that brings its singular values near 1, times sqrt(max(1, rows / columns)).
    """

    def __init__(self, parameters: Sequence[Tensor], optim: Any) -> None:
        self.parameters, self.optim = parameters, optim
        self.momenta = [torch.zeros_like(p) for p in parameters]

    @torch.no_grad()
    def step(self) -> None:
        beta, rate = self.optim.muon_momentum, self.optim.muon_lr
        for parameter, momentum in zip(self.parameters, self.momenta, strict=True):
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            momentum.copy_(beta * momentum + (1 - beta) * gradient)
            ahead = (1 - beta) * gradient + beta * momentum
            parameter *= 1 - rate * self.optim.weight_decay
            parameter -= rate * self.scale(*parameter.shape) * self.orthogonal(ahead.double()).float()

    def scale(self, rows: int, columns: int) -> float:
        return math.sqrt(max(1.0, rows / columns))

    def orthogonal(self, matrix: Tensor) -> Tensor:
        """Five Newton-Schulz steps x -> (3.4445 + (-4.7750 + 2.0315 x xT) x xT) x, from a Frobenius norm of 1."""
        x = matrix / (matrix.norm() + 1e-7)
        for _ in range(5):
            gram = x @ x.T
            x = 3.4445 * x - 4.7750 * gram @ x + 2.0315 * gram @ gram @ x
        return x


def _naive_adamw(named: Mapping[str, Tensor], recipe: Recipe) -> torch.optim.AdamW:
    plain = {name for name in named if name.endswith("bias") or "norm" in name.lower()}
    optim = recipe.optim
    groups = [
        {"params": [p for name, p in named.items() if name not in plain], "weight_decay": optim.weight_decay},
        {"params": [named[name] for name in plain], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=optim.lr, betas=(optim.beta1, optim.beta2), eps=optim.eps, foreach=False)


def _naive_masked(module: Any, batches: Sequence[MaskedBatch], recipe: Recipe, step: int) -> Tensor:
    (batch,) = batches
    rows = torch.arange(len(batch.offsets) - 1)

    def cut(values: Tensor, fill: int) -> Tensor:
        return pad_flat(values, batch.offsets, rows, fill=fill).long()

    attention = (cut(batch.encoder_input_ids, -1) >= 0).long()
    base, head, table = module.encoder.backbone, module.head, module.vocabulary_loss
    hidden = base(cut(batch.encoder_input_ids, 0), attention_mask=attention, output_hidden_states=True).hidden_states

    def transformed(states: Tensor) -> Tensor:
        projected = states @ head.weight[:, : states.shape[-1]].T + head.bias
        return F.layer_norm(F.gelu(projected), head.norm_weight.shape, head.norm_weight, head.norm_bias, head.eps)

    def cross_entropy(states: Tensor, labels: Tensor) -> Tensor:
        logits = states @ table.weight.T + table.bias
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)

    seen = None
    if batch.visibility_keys is not None:
        share = 1.0 - recipe.objective.decoder_mask_ratio
        seen = torch.zeros(*attention.shape, attention.shape[1], dtype=torch.bool)
        seen[:, :, 0] = True  # rows that predict nothing must still attend to something
        columns = naive_visibility(batch.visibility_keys.tolist(), batch.offsets.diff().tolist(), share)
        for text, rows_of_text in enumerate(columns):
            for row, visible in enumerate(rows_of_text):
                seen[text, row, visible] = True
    sizes, weights, _ = plan_of(recipe, step)
    total = torch.zeros(())
    for size, weight in zip(sizes, weights):
        states = transformed(hidden[size.layers][..., : size.dim])
        loss = cross_entropy(states, cut(batch.encoder_labels, -100))
        if batch.decoder_input_ids is not None and batch.decoder_labels is not None:
            embedded = base.embeddings(cut(batch.decoder_input_ids, 0))[:, 1:]
            content = torch.cat([states[:, :1], embedded], dim=1)
            if seen is None:
                decoded = _naive_decoder(module.decoder, content, content, attention[:, None, :] == 1)
            else:
                places = base.embeddings.position_embeddings.weight[: attention.shape[1]]
                decoded = _naive_decoder(module.decoder, states[:, :1] + places, content, seen)
            loss = loss + cross_entropy(transformed(decoded), cut(batch.decoder_labels, -100))
        total = total + weight * recipe.objective.loss_scale * loss
    if batch.pairs is not None:
        guided = naive_guide([batch.pairs], recipe) if recipe.guide.model else {}
        vectors = [_pooled(hidden[size.layers], attention, recipe)[:, : size.dim] for size in sizes]
        count = len(batch.pairs.queries)
        if recipe.objective.symmetric_spans:
            loss = _naive_symmetric(vectors, batch.pairs, recipe, weights)
            return total + recipe.objective.pair_weight * loss
        total = total + recipe.objective.pair_weight * naive_contrastive_loss(
            [each[:count] for each in vectors],
            [each[count:] for each in vectors],
            targets=batch.pairs.targets,
            excluded=naive_false_negatives([batch.pairs], batch.pairs.targets),
            excluded_queries=naive_false_negative_queries([batch.pairs], batch.pairs.targets),
            passage_query=batch.pairs.passage_query,
            query_weights=batch.pairs.weights,
            owners=naive_owners([batch.pairs]),
            gold=None,
            weights=weights,
            kl_weights=[],
            objective=replace(recipe.objective, kl="none"),
            **guided,
        )
    return total


def _naive_symmetric(vectors: Sequence[Tensor], pairs: PairBatch, recipe: Recipe, weights: Sequence[float]) -> Tensor:
    """The loss of each span, once, against its partner and all spans of other texts. vectors: K of [2n, d_k]."""
    texts = torch.cat([pairs.query_hashes, pairs.passage_hashes]).tolist()
    partner = [(i + len(texts) // 2) % len(texts) for i in range(len(texts))]
    total = vectors[0].new_zeros(())
    for i, (text, j) in enumerate(zip(texts, partner)):
        equals = {text, texts[j], *(texts[partner[k]] for k in range(len(texts)) if texts[k] == text)}
        kept = [j, *(k for k in range(len(texts)) if k not in (i, j) and texts[k] not in equals)]
        total = total + naive_contrastive_loss(
            [each[i : i + 1] for each in vectors],
            [each[kept] for each in vectors],
            targets=torch.tensor([0]),
            gold=None,
            weights=weights,
            kl_weights=[],
            objective=replace(recipe.objective, kl="none", spread_weight=0.0),
        )
    total = total / len(texts)
    for each, weight in zip(vectors, weights):
        total = total + recipe.objective.spread_weight * weight * 2 * naive_spread(each)
    return total


def _pooled(states: Tensor, attention: Tensor, recipe: Recipe) -> Tensor:
    if recipe.model.pooling == "cls":
        return states[:, 0]
    return (states * attention[..., None]).sum(1) / attention.sum(1, keepdim=True)


def _naive_decoder(decoder: Any, asking: Tensor, states: Tensor, seen: Tensor) -> Tensor:
    """One post-norm transformer layer over whole sequences [B, L, D], with full score matrices.

    asking: the states of the attention's queries; seen: bool [B, L or 1, L], the positions that each may attend to.
    """
    batch, length, hidden = states.shape

    def heads(projected: Tensor) -> Tensor:
        return projected.view(batch, length, decoder.num_heads, -1).transpose(1, 2)

    query, key, value = heads(decoder.query(asking)), heads(decoder.key(states)), heads(decoder.value(states))
    scores = query @ key.transpose(2, 3) / query.shape[-1] ** 0.5
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    mixed = (scores.softmax(-1) @ value).transpose(1, 2).reshape(batch, length, hidden)
    attended = decoder.attention_norm(decoder.attention_output(mixed) + asking)
    return decoder.output_norm(decoder.down(F.gelu(decoder.up(attended))) + attended)


def _naive_contrastive(module: Any, batches: Sequence[PairBatch], recipe: Recipe, step: int) -> Tensor:
    sizes, *_ = plan_of(recipe, step)
    embeddings, whole = [], []
    for rank, batch in enumerate(batches):
        wanted = [*sizes, *(replace(size, dim=recipe.ladder.full.dim) for size in sizes)]
        found = _embed_naively(module, batch, recipe, wanted, step=step, rank=rank)
        embeddings.append(found[: len(sizes)])
        whole.append(found[len(sizes) :])
    taught = None
    if recipe.teacher.vectors == "stored":
        taught = torch.cat([torch.cat(naive_stored(batch, recipe.teacher.store)) for batch in batches])
    elif recipe.teacher.model:
        taught = naive_teacher([text for batch in batches for text in _texts_of(batch)], recipe)
    guided = naive_guide(batches, recipe) if recipe.guide.model else {}
    return naive_terms(embeddings, whole, batches, recipe, step, guided=guided, taught=taught)


def naive_terms(
    embeddings: Sequence[Sequence[Tensor]],
    whole: Sequence[Sequence[Tensor]],
    batches: Sequence[PairBatch],
    recipe: Recipe,
    step: int,
    *,
    guided: Mapping[str, Any],
    taught: Tensor | None,
) -> Tensor:
    """The sum of a fine-tuning recipe's terms.

    embeddings: of each batch, K of [n + m, d_k], queries first. whole: the same texts' vectors at the depths of those
    sizes, K of [n + m, D]. guided: the guide's similarities and temperature (`naive_guide`). taught: the teacher's
    vectors of all batches' texts.
    """
    _, weights, kl_weights = plan_of(recipe, step)
    objective, total = recipe.objective, torch.zeros(())
    vectors, depths = ([torch.cat(each) for each in zip(*found)] for found in (embeddings, whole))
    if taught is not None:
        roles = [role for batch in batches for role in _roles_of(batch)]
        total = total + naive_teaching(vectors, taught, recipe, weights, roles)
    if objective.compression_weight:
        for each, weight, deep in zip(vectors, weights, depths):
            if each.shape[1] < deep.shape[1]:
                distance = naive_compression(deep, each.shape[1], objective.compression_temperature)
                total = total + weight * objective.compression_weight * distance
    counts = [len(batch.queries) for batch in batches]
    seen = [sum(len(batch.passages) for batch in batches[:number]) for number in range(len(batches))]
    targets = torch.cat([batch.targets + before for batch, before in zip(batches, seen)])
    owners = [batch.passage_query + sum(counts[:number]) for number, batch in enumerate(batches)]
    gold = [batch.scores for batch in batches if batch.scores is not None]
    given = [batch.weights for batch in batches if batch.weights is not None]
    masks = objective.mask_false_negatives
    return total + naive_contrastive_loss(
        [torch.cat([own[:count] for own, count in zip(each, counts)]) for each in zip(*embeddings)],
        [torch.cat([own[count:] for own, count in zip(each, counts)]) for each in zip(*embeddings)],
        targets=targets,
        excluded=naive_false_negatives(batches, targets) if masks else None,
        gold=torch.cat(gold) if gold else None,
        weights=weights,
        kl_weights=[weight * objective.kl_weight for weight in kl_weights],
        objective=objective,
        passage_query=torch.cat(owners),
        query_weights=torch.cat(given) if given else None,
        owners=naive_owners(batches),
        excluded_queries=naive_false_negative_queries(batches, targets) if masks else None,
        **guided,
    )


def _naive_distillation(module: Any, batches: Sequence[TextBatch], recipe: Recipe, step: int) -> Tensor:
    sizes, weights, _ = plan_of(recipe, step)
    texts = [text for batch in batches for text in _texts_of(batch)]
    rows = []
    for text in texts:
        mapped = {}
        for size in sizes:
            with first_neurons(module.backbone, size.feed_forward):
                hidden = module.backbone(text[None].long(), output_hidden_states=True).hidden_states
            pooled, n = hidden[size.layers][0].mean(0), str(size.layers)
            mapped[size] = (module.heads[n](pooled) if n in module.heads else pooled)[: size.dim]
        rows.append([mapped[size] for size in sizes])
    vectors = [torch.stack(each) for each in zip(*rows)]
    return naive_teaching(vectors, naive_teacher(texts, recipe), recipe, weights)


def _roles_of(batch: PairBatch) -> list[str]:
    """What each text is, the queries first."""
    positives = set(batch.targets.tolist())
    return ["query"] * len(batch.queries) + [
        "positive" if row in positives else "negative" for row in range(len(batch.passages))
    ]


def naive_stored(batch: PairBatch, folder: str) -> tuple[Tensor, Tensor]:
    """The stored unit vectors of a batch's queries and passages, looked up one by one in all of the store's files."""
    held: dict[int, Tensor] = {}
    for path in sorted(Path(folder).glob("*.keys.npy")):
        vectors = torch.from_numpy(np.load(str(path).replace(".keys.", ".f16.")).astype(np.float32))
        held |= {int(key): vector for (key,), vector in zip(np.load(path), vectors)}
    marked = batch.query_hashes.numpy().view(np.uint64) ^ np.uint64(int.from_bytes(b"queries", "big"))
    sides = [mix64(marked).view(np.int64), batch.passage_hashes.numpy()]
    first, second = (torch.stack([held[int(key)] / held[int(key)].norm() for key in side]) for side in sides)
    return first, second


def _texts_of(batch: TextBatch | PairBatch) -> list[Tensor]:
    sides = [batch.texts] if isinstance(batch, TextBatch) else [batch.queries, batch.passages]
    return [side.tokens[a:b] for side in sides for a, b in pairwise(side.offsets.tolist())]


@torch.no_grad()
def naive_teacher(texts: Sequence[Tensor], recipe: Recipe) -> Tensor:
    """Unit vectors of the recipe's teacher, computed text by text: mean pooling of its last layer."""
    backbone = AutoModel.from_pretrained(recipe.teacher.model).eval()
    vectors = torch.stack([backbone(text[None].long()).last_hidden_state[0].mean(0) for text in texts])
    return F.normalize(vectors, dim=1)


def naive_teaching(
    vectors: Sequence[Tensor], teacher: Tensor, recipe: Recipe, weights: Sequence[float], roles: Sequence[str] = ()
) -> Tensor:
    """Every term of trainer/losses/distillation.py as its formula reads, over all texts at once.

    roles: each text's; with teacher.balance = "roles" each role's texts weigh as much as another's, together.
    """
    chosen, total, rows = recipe.teacher, torch.zeros(()), range(len(teacher))
    taught = teacher @ teacher.T
    share = torch.full((len(teacher),), 1 / len(teacher))  # of a text in a mean
    if chosen.balance == "roles":
        share = torch.tensor([1 / roles.count(role) / len(set(roles)) for role in roles])
    for size, weight in zip(vectors, weights):
        unit = F.normalize(size, dim=1)
        scores = unit @ unit.T
        away = 1 - F.cosine_similarity(size, teacher[:, : size.shape[1]], dim=1)
        loss = chosen.vector_weight * (share * away).sum()
        loss = loss + chosen.gram_weight * (share[:, None] * share * (scores - taught).square()).sum()
        if chosen.similarity_weight:
            others = ~torch.eye(len(teacher), dtype=torch.bool)
            target, logits = (
                (each / chosen.temperature)[others].view(len(teacher), -1).log_softmax(1) for each in (taught, scores)
            )
            divergence = (target.exp() * (target - logits)).sum(1)
            loss = loss + chosen.similarity_weight * (share * divergence).sum()
        if chosen.order_weight:
            triples = [
                F.relu((scores[i, j] - scores[i, k]) * (taught[i, k] - taught[i, j]).sign() + 0.015)
                for i in rows
                for j in rows
                for k in rows
            ]
            of_texts = torch.stack(triples).view(len(teacher), -1).mean(1)
            loss = loss + chosen.order_weight * (share * of_texts).sum()
        total = total + weight * loss
    return total


@torch.no_grad()
def naive_guide(batches: Sequence[PairBatch], recipe: Recipe) -> dict[str, Any]:
    """The guide's similarities and temperature; texts are encoded one by one, cut to the guide's own lengths.

    The vectors of a store are looked up in it.
    """
    folder = Path(recipe.guide.model)
    if recipe.guide.store:
        queries, passages = (torch.cat(side) for side in zip(*(naive_stored(b, recipe.guide.store) for b in batches)))
        temperature = json.loads((folder / "barista.json").read_text())["temperature"]
        return {"guide": queries @ passages.T, "guide_temperature": recipe.guide.temperature or temperature}
    settings, backbone = json.loads((folder / "barista.json").read_text()), AutoModel.from_pretrained(folder).eval()
    layers, dim = settings["ladder"][-1]

    def embed(text: Tensor, longest: int) -> Tensor:
        if len(text) > longest:
            text = torch.cat([text[: longest - 1], text[-1:]])
        if backbone.config.model_type == "static":
            vector = backbone.embedding.weight[text[1:-1].long()].mean(0)[:dim]
        else:
            hidden = backbone(text[None].long(), output_hidden_states=True).hidden_states[layers][0, :, :dim]
            vector = hidden.mean(0) if settings["pooling"] == "mean" else hidden[0]
        return vector / vector.norm() if settings["similarity"] == "cosine" else vector

    lengths = {"queries": settings["query_max_length"], "passages": settings["passage_max_length"]}

    def all_of(side: str) -> Tensor:
        texts = [
            getattr(batch, side).tokens[a:b]
            for batch in batches
            for a, b in pairwise(getattr(batch, side).offsets.tolist())
        ]
        return torch.stack([embed(text, lengths[side]) for text in texts])

    first, second = all_of("queries"), all_of("passages")
    seen = [0]
    for batch in batches:
        seen.append(seen[-1] + len(batch.passages))
    targets = torch.cat([batch.targets + before for batch, before in zip(batches, seen)])
    owners = naive_owners(batches)
    similarity = blocks_of_negatives(first, second, targets, owners, recipe.objective, lambda q, p: q @ p.T)
    return {"guide": similarity, "guide_temperature": recipe.guide.temperature or settings["temperature"]}


def naive_owners(batches: Sequence[PairBatch]) -> Tensor:
    """int64 [r] over all batches: the query of each target."""
    found, seen = [], 0
    for batch in batches:
        own = torch.arange(len(batch.queries)) if batch.target_query is None else batch.target_query
        found.append(own + seen)
        seen += len(batch.queries)
    return torch.cat(found)


def _hashes_of(batches: Sequence[PairBatch]) -> tuple[dict[int, set[int]], list[int], list[int]]:
    """Of all batches: each query's text with its known positives, the queries' texts and the passages' texts."""
    known: dict[int, set[int]] = {}
    queries, passages = [], []
    for batch in batches:
        offsets = batch.known_offsets.tolist()
        for query, begin, end in zip(batch.query_hashes.tolist(), offsets, offsets[1:]):
            known.setdefault(query, {query}).update(batch.known_hashes[begin:end].tolist())
            queries.append(query)
        passages += batch.passage_hashes.tolist()
    return known, queries, passages


def naive_false_negatives(batches: Sequence[PairBatch], targets: Tensor) -> Tensor:
    """bool [r, m] over all batches: the passages that equal a query's text or a known positive, so no negatives."""
    known, queries, passages = _hashes_of(batches)
    return torch.tensor(
        [
            [
                column != target and (text in known[query] or text == passages[target])
                for column, text in enumerate(passages)
            ]
            for query, target in zip([queries[owner] for owner in naive_owners(batches)], targets.tolist())
        ]
    )


def naive_false_negative_queries(batches: Sequence[PairBatch], targets: Tensor) -> Tensor:
    """bool [r, n] over all batches: queries whose text is no negative of a query, or of which its positive is one."""
    known, queries, passages = _hashes_of(batches)
    positives = [passages[target] for target in targets.tolist()]
    return torch.tensor(
        [
            [
                i != j and (other in known[queries[i]] or other == positive or positive in known[other])
                for j, other in enumerate(queries)
            ]
            for i, positive in zip(naive_owners(batches).tolist(), positives)
        ]
    )


@contextlib.contextmanager
def first_neurons(bert: Any, fraction: float) -> Iterator[None]:
    """Inside, a BERT's feed-forwards run whole, and all activations but the first fraction are multiplied by 0."""
    if fraction == 1:
        yield
        return

    def hook(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        count = args[0].shape[-1]
        return (args[0] * (torch.arange(count) < fraction * count),)

    hooks = [layer.output.dense.register_forward_pre_hook(hook) for layer in bert.encoder.layer]
    try:
        yield
    finally:
        for each in hooks:
            each.remove()


def _embed_naively(
    module: Any, batch: PairBatch, recipe: Recipe, sizes: Sequence[Size], *, step: int, rank: int
) -> list[Tensor]:
    """K of [queries + passages, d]: one forward pass for all texts, or with dropout one per keyed chunk."""
    texts = [batch.queries.tokens[a:b] for a, b in zip(batch.queries.offsets, batch.queries.offsets[1:])]
    texts += [batch.passages.tokens[a:b] for a, b in zip(batch.passages.offsets, batch.passages.offsets[1:])]
    if recipe.model.config.get("model_type") == "static":
        # The two special tokens at the ends of a text do not count.
        table = module.backbone.embedding.weight
        whole = torch.stack([table[text[1:-1].long()].mean(0) for text in texts])
        return [whole[:, : size.dim] for size in sizes]
    lengths = torch.tensor([len(text) for text in texts])
    left_out = torch.zeros(len(texts), dtype=torch.int64)
    if not recipe.model.pool_prompt:
        count = len(batch.queries)
        left_out[:count], left_out[count:] = (_prompt_length(recipe, prompts) for prompts in recipe.prompts)
    drops = recipe.model.config.get("hidden_dropout_prob", 0.0) > 0
    chunks = [torch.arange(len(texts))]
    if drops and recipe.objective.backward == "grad_cache":
        longest = max(recipe.data.query_max_length, recipe.data.passage_max_length)
        chunks = micro_batches(lengths, token_budget=recipe.train.micro_batch_size * longest)
    outputs: list[list[Tensor]] = [[] for _ in sizes]
    for index, rows in enumerate(chunks):
        if drops:
            torch.manual_seed(derive_seed(derive_seed(recipe.run.seed, step, rank), index))
        ids = nn.utils.rnn.pad_sequence([texts[int(row)].long() for row in rows], batch_first=True)
        mask = (torch.arange(ids.shape[1]) < lengths[rows, None]).long()
        hidden_of = {}
        for fraction in dict.fromkeys(size.feed_forward for size in sizes):
            with first_neurons(module.backbone, fraction):
                states = module.backbone(ids, attention_mask=mask, output_hidden_states=True).hidden_states
            hidden_of[fraction] = states
        # A module that is written out is a BERT, which has none.
        norm = final_norm(module.backbone) if isinstance(module.backbone, nn.Module) else None
        for collected, size in zip(outputs, sizes):
            # transformers applies a final norm to the last state alone, and a model that is cut ends with it, too.
            hidden = hidden_of[size.feed_forward]
            is_last = norm is None or size.layers == len(hidden) - 1
            states = (hidden[size.layers] if is_last else norm(hidden[size.layers]))[..., : size.dim]
            if recipe.model.pooling == "mean":
                kept = mask * (torch.arange(ids.shape[1]) >= left_out[rows, None])
                collected.append((states * kept[..., None]).sum(1) / kept.sum(1, keepdim=True))
            elif recipe.model.pooling == "last":
                collected.append(states[torch.arange(len(rows)), lengths[rows] - 1])
            else:
                collected.append(states[:, 0])
    order = torch.cat(chunks).argsort()
    return [torch.cat(each)[order] for each in outputs]


def _prompt_length(recipe: Recipe, prompts: Sequence[str]) -> int:
    """Tokens of the one prompt of all folders, [CLS] included and [SEP] not."""
    tokenizer = load_tokenizer(ShardFolder(recipe.data.shards[0]).tokenizer_path)
    return len(tokenizer(prompts[0]).input_ids) - 1 if prompts else 0


def naive_compression(whole: Tensor, dim: int, temperature: float) -> Tensor:
    """ESE's D(v[:k], PCA_k(v)) in float64. A component's sign is the one that agrees more with its coordinate."""
    m = whole.double()
    u, s, _ = torch.linalg.svd((m.T @ m / m.shape[1] ** 0.5).softmax(-1).detach())
    components = m.detach() @ u[:, :dim] @ s[:dim].diag()
    components = components * (components * m.detach()[:, :dim]).sum(0).sign()
    student, teacher = m[:, :dim] / temperature, components / temperature
    divergence = F.kl_div(student.log_softmax(1), teacher.softmax(1), reduction="batchmean")
    return F.mse_loss(m[:, :dim], components) + temperature * divergence


def naive_spread(vectors: Tensor) -> Tensor:
    """EmbeddingGemma's L_S of one side: 1/(B(B−1)) Σ_{i≠j} cos(x_i, x_j)²; of one text it is 0."""
    count = len(vectors)
    pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
    cosines = [F.cosine_similarity(vectors[i], vectors[j], dim=0) for i, j in pairs]
    return torch.stack(cosines).square().mean() if cosines else vectors.sum() * 0.0


def naive_contrastive_loss(
    queries: Sequence[Tensor],
    passages: Sequence[Tensor],
    *,
    targets: Tensor,
    gold: Tensor | None,
    weights: Sequence[float],
    kl_weights: Sequence[float],
    objective: Any,
    excluded: Tensor | None = None,
    guide: Tensor | None = None,
    guide_temperature: float = 1.0,
    passage_query: Tensor | None = None,
    excluded_queries: Tensor | None = None,
    query_weights: Tensor | None = None,
    owners: Tensor | None = None,
) -> Tensor:
    """The SRL losses with whole matrices. `queries`, `passages`: K of [n, d_k] and [m, d_k]; the last is the full size.

    excluded: bool [n, m]. guide: the guide's similarities [n, columns]. passage_query: int64 [m], each passage's query.
    excluded_queries: bool [n, n]. query_weights: [n]. owners: int64 [r], the query of each of r targets where a query
    has several: a row for each, of which the query's loss is the mean. `excluded`, `excluded_queries` and `guide` have
    a row for each target, too.
    """
    count = len(queries[0])
    owners = torch.arange(count) if owners is None else owners

    def scores(q: Tensor, p: Tensor) -> Tensor:
        if objective.similarity == "cosine":
            q, p = q / q.norm(dim=1, keepdim=True), p / p.norm(dim=1, keepdim=True)
        return q @ p.T / objective.temperature

    matrices = [blocks_of_negatives(q, p, targets, owners, objective, scores) for q, p in zip(queries, passages)]
    hidden = _hidden_in_blocks(owners, len(passages[0]), targets, objective, excluded, excluded_queries)
    if getattr(objective, "filter_false_negatives", False):
        by_guide = getattr(objective, "filter_by", "full") == "guide"
        similarity = guide if by_guide else matrices[-1].detach() * objective.temperature
        assert similarity is not None
        too_near = similarity > similarity.gather(1, targets[:, None]) - objective.false_negative_margin
        hidden = hidden | too_near.scatter(1, targets[:, None], False)
    weighted_guide = guide
    if hardness := getattr(objective, "hardness", 0.0):
        # w = exp(α · sg(s)) before the exponential of a query's own hard negatives.
        assert passage_query is not None
        hard = passage_query == owners[:, None]
        hard[:, targets] = False
        hard = F.pad(hard, (0, matrices[0].shape[1] - len(passage_query)))
        weighted = [hard * hardness * matrix.detach() * objective.temperature for matrix in matrices]
        matrices = [matrix + extra for matrix, extra in zip(matrices, weighted)]
        if guide is not None:
            weighted_guide = guide + hard * hardness * guide * guide_temperature
    if objective.loss != "cosent":
        matrices = [matrix.masked_fill(hidden, -1e9) for matrix in matrices]
    of_queries = torch.ones(count, dtype=matrices[0].dtype) if query_weights is None else query_weights
    shares = of_queries[owners] / owners.bincount()[owners]  # of each row

    def mean(terms: Tensor) -> Tensor:
        return (shares * terms).sum() / count

    total = queries[0].new_zeros(())
    for matrix, weight in zip(matrices, weights):
        if objective.loss == "cosent":
            assert gold is not None
            similarity = matrix.gather(1, targets[:, None])[:, 0]
            terms = [
                torch.exp(similarity[j] - similarity[i])
                for i in range(len(gold))
                for j in range(len(gold))
                if gold[i] > gold[j]
            ]
            total = total + weight * torch.log(1 + torch.stack(terms).sum())
        else:
            total = total + weight * mean(F.cross_entropy(matrix, targets, reduction="none"))
    for query, weight in zip(queries[:-1], weights):  # small queries against the full size's passages
        if asymmetric := getattr(objective, "asymmetric_weight", 0.0):
            matrix = scores(query[owners], passages[-1][:, : query.shape[1]])
            if hardness:
                plain = matrix.detach() * objective.temperature
                matrix = matrix + hard[:, : matrix.shape[1]] * hardness * plain
            matrix = matrix.masked_fill(hidden[:, : matrix.shape[1]], -1e9)
            losses = F.cross_entropy(matrix, targets, reduction="none")
            total = total + weight * asymmetric * mean(losses)
    for query, passage, weight in zip(queries, passages, weights):
        if spread := getattr(objective, "spread_weight", 0.0):
            total = total + weight * spread * (naive_spread(query) + naive_spread(passage[targets]))
    if objective.kl == "none":
        return total
    if objective.kl == "margins":
        assert passage_query is not None
        if objective.kl_teacher == "guide":
            assert guide is not None
            taught = guide[:, : len(passages[0])] / guide_temperature
        else:
            taught = scores(queries[-1], passages[-1])
            taught = taught.detach() if objective.detach_teacher else taught
        pairs = [(i, j) for j, i in enumerate(passage_query.tolist()) if j != targets[i]]
        for k, weight in enumerate(kl_weights):
            own = scores(queries[k], passages[k])
            for i, j in pairs:
                error = (own[i, targets[i]] - own[i, j]) - (taught[i, targets[i]] - taught[i, j])
                total = total + weight * of_queries[i] * error**2 / len(pairs)
        return total
    for k, weight in enumerate(kl_weights):
        if not weight:
            continue
        if getattr(objective, "kl_teacher", "full") == "guide":
            assert weighted_guide is not None
            taught = (weighted_guide / guide_temperature).masked_fill(hidden, -1e9)
            student, teacher, factor = matrices[k], taught, 1.0
        elif objective.kl == "scores":
            student, teacher, factor = matrices[k], matrices[-1], 1.0
        else:
            student = torch.cat([queries[k], passages[k]]) / objective.kl_temperature
            teacher = torch.cat([queries[-1], passages[-1]])[:, : student.shape[1]] / objective.kl_temperature
            factor = objective.kl_temperature
        target = teacher.detach() if objective.detach_teacher else teacher
        terms = F.kl_div(student.log_softmax(1), target.log_softmax(1), reduction="none", log_target=True).sum(1)
        if len(terms) == len(shares):
            total = total + weight * factor * mean(terms)
        else:
            total = total + weight * factor * (_of_texts(of_queries, passage_query, len(terms)) * terms).mean()
    return total


def _of_texts(of_queries: Tensor, passage_query: Tensor | None, count: int) -> Tensor:
    """The weights of queries, and then of their passages."""
    if passage_query is None:
        return torch.ones(count, dtype=of_queries.dtype)
    return torch.cat([of_queries, of_queries[passage_query]])


def blocks_of_negatives(q: Tensor, p: Tensor, targets: Tensor, owners: Tensor, objective: Any, scores: Any) -> Tensor:
    """What shares a row's denominator: [r, m], then the further blocks of `objective.negatives`, side by side."""
    further = {"query_query": (q[owners], q), "passage_passage": (p[targets], p), "passage_query": (p[targets], q)}
    names = getattr(objective, "negatives", ["query_passage"])
    return torch.cat([scores(q[owners], p), *(scores(*pair) for name, pair in further.items() if name in names)], dim=1)


def _hidden_in_blocks(
    owners: Tensor,
    num_passages: int,
    targets: Tensor,
    objective: Any,
    excluded: Tensor | None,
    excluded_queries: Tensor | None,
) -> Tensor:
    """bool [r, columns]: what is left out of each block; always a query's other positives, and a text's own column."""
    nothing = torch.zeros(len(owners), num_passages, dtype=torch.bool)
    same_query = (owners[:, None] == owners) & ~torch.eye(len(owners), dtype=torch.bool)
    passages = nothing.clone() if excluded is None else excluded.clone()
    for row, other in same_query.nonzero().tolist():
        passages[row, targets[other]] = True
    itself = owners[:, None] == torch.arange(int(owners.max()) + 1)
    queries = itself if excluded_queries is None else excluded_queries | itself
    positive = nothing.scatter(1, targets[:, None], True)
    further = {"query_query": queries, "passage_passage": passages | positive, "passage_query": queries}
    names = getattr(objective, "negatives", ["query_passage"])
    return torch.cat([passages, *(block for name, block in further.items() if name in names)], dim=1)
