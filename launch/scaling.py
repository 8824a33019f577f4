"""What a step of a recipe costs on hardware that is not here: operations, memory, bytes sent and time, from counts.

This is the hardware's side: GPUs, links, ZeRO's states, collectives and the step. The objective's own share of the
costs comes from trainer/costs/objective_costs.py.

Nothing is fitted. Operations, stored activations, states and bytes sent follow from the model's shape and from what
trainer/ and DeepSpeed do, which tests/launch/test_plan.py compares with measurements; speeds are the makers' data
sheets times three stated shares (`Assumptions`). docs/scaling.md derives the formulas, with references, and says what
was measured and what was not. Torch-free: a login node can plan.

Units: bytes, seconds, operations; P is the number of parameters, W of ranks, k of micro-batches a step on a rank.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.config.schema import Recipe
from trainer.costs.counts import Texts
from trainer.costs.exchange import RING_CHUNKS, ring_gradients_sent, ring_vectors_sent
from trainer.costs.gpus import listed_peak_flops
from trainer.costs.layers import kernels, wide_gradients
from trainer.costs.objective_costs import ObjectiveCosts, costs_of, with_kept_graphs
from trainer.costs.parameters import embedding_parameters, encoder_parameters, layer_matrices, stem_parameters
from trainer.costs.shapes import Shape

STAGES = (0, 1, 2, 3)
GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """A maker's data sheet, by the driver's name of the product: bytes, bytes a second."""

    product: str
    memory: float
    memory_bandwidth: float
    link_bandwidth: float  # to the node's other GPUs, one way

    @property
    def peak_flops(self) -> float:
        """Dense bf16 operations a second."""
        peak = listed_peak_flops(self.product)
        assert peak is not None
        return peak


# SXM modules: NVIDIA A100 (80 GB), H100 and H200 data sheets.
GPUS = {
    "a100": Gpu("A100-SXM4-80GB", 80e9, 2.039e12, 300e9),
    "h100": Gpu("H100 80GB HBM3", 80e9, 3.35e12, 450e9),
    "h200": Gpu("H200", 141e9, 4.8e12, 450e9),
}


@dataclass(frozen=True)
class Link:
    """Between nodes: bytes a second that one node sends on all its adapters, and seconds a message takes at least."""

    bandwidth: float
    latency: float


# Adapters' nominal rates; the latencies are of the order that each kind is known for, not measured here.
INTERCONNECTS = {
    "ethernet-10g": Link(10e9 / 8, 30e-6),
    "ethernet-25g": Link(25e9 / 8, 30e-6),
    "ethernet-100g": Link(100e9 / 8, 20e-6),
    "ib-hdr": Link(200e9 / 8, 5e-6),
    "ib-hdr-8x": Link(8 * 200e9 / 8, 5e-6),
    "ib-ndr": Link(400e9 / 8, 5e-6),
    "ib-ndr-8x": Link(8 * 400e9 / 8, 5e-6),
    "efa-v2": Link(3200e9 / 8, 15e-6),
}
NODE_LATENCY = 3e-6  # of a message between two GPUs of a node


@dataclass(frozen=True)
class Assumptions:
    """What data sheets leave open. None of these was measured on a GPU."""

    matrix_share: float = 0.7  # of peak_flops, in matrix products
    memory_share: float = 0.8  # of memory_bandwidth, in everything else
    link_share: float = 0.8  # of a link's bandwidth
    launch_seconds: float = 10e-6  # the host's time for a kernel, Python and autograd included
    context_bytes: float = 1.5 * GIB  # CUDA's context, libraries' workspaces, fragmentation


@dataclass(frozen=True)
class Cluster:
    nodes: int
    gpus_per_node: int
    gpu: Gpu
    link: Link

    @property
    def ranks(self) -> int:
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True)
class Stage:
    """What a ZeRO stage keeps and sends, in bytes a parameter, as the shipped ds_configs set it up.

    Adam's moments in float32 are 8 bytes a parameter, the float32 master 4, a float32 gradient 4. Muon's momentum is 4
    (`MUON_SPARES`).
    """

    weights: float  # on every rank; at stage 3 while they are gathered, which is all of a micro-batch
    gradients: float  # on every rank
    divided: float  # divided among the ranks, at the peak of a step
    rests: tuple[float, float]  # between steps beside the weights: on every rank, and divided
    sent_gradient: float  # in one reduction
    reduces_each_micro_batch: bool
    sent_weights: float  # in one gather of the weights
    bucket: float  # bytes an element of DeepSpeed's reduction bucket


# ds_configs/zero{0,1,2,3}.json; stage 0 keeps its weights in float32.
STAGE_CONFIGS = {
    0: Stage(4, 4, 8, (8, 0), 4, False, 0, 0),
    1: Stage(2, 4, 4 + 12, (4, 12), 4, False, 2, 4),
    2: Stage(2, 0, 4 + 12, (0, 12), 4, True, 2, 4),
    3: Stage(2, 0, 2 + 4 + 12, (0, 4 + 12), 4, True, 2, 4),
}
MUON_SPARES = 4  # bytes of a parameter that is Muon's, where Adam's would keep a second moment
ZERO1_FLOAT32 = Stage(4, 4, 4 + 12, (0, 12), 4, False, 4, 4)  # ds_configs/zero1_float32.json

BUCKET_ELEMENTS = 50_000_000  # reduce_bucket_size of the shipped ds_configs; a BERT's table fits
PERSISTENT_ELEMENTS = 100_000  # stage 3 leaves smaller parameters whole (stage3_param_persistence_threshold)
# Stage 3 holds no more weights at a time (stage3_max_live_parameters), and releases those that no module needs within
# as many elements (stage3_max_reuse_distance): DeepSpeed's defaults.
LIVE_ELEMENTS = 1_000_000_000
PLANNED_MEMORY = 0.92  # the share of a GPU's memory that a step may need


# --- the model ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FrozenGuide:
    """A guide (trainer/objectives/guide.py): whole on every rank at any stage, one forward pass of all texts a step.

    A stored guide is its vectors alone: it makes no pass and has no weights on the GPU.
    """

    shape: Shape  # a table of token embeddings has 0 layers, and so has a stored guide
    bytes: float

    @classmethod
    def stored(cls, width: int) -> FrozenGuide:
        return cls(Shape(width, 0, 0, 0), 0.0)

    @classmethod
    def of(cls, shape: Shape) -> FrozenGuide:
        if not shape.layers:  # a table stays in float32
            return cls(shape, 4.0 * shape.vocabulary * shape.hidden)
        return cls(shape, 2.0 * sum(encoder_parameters(shape)))


@dataclass(frozen=True)
class Model:
    """Parameters, and which of them train; those that stage 3 divides, and those that it leaves whole."""

    shape: Shape
    parameters: float
    trained: float
    divided: float
    whole: float  # of those that train
    by_muon: float = 0.0  # of those that train
    guide: FrozenGuide | None = None

    @classmethod
    def of(cls, recipe: Recipe, shape: Shape, *, guide: FrozenGuide | None = None) -> Model:
        if recipe.single_size is not None:
            shape = dataclasses.replace(shape, layers=recipe.single_size.layers)
        costs = costs_of(recipe)
        heads = costs.head_parameters(shape)
        sizes = encoder_parameters(shape) + costs.own_parameters(shape) + heads
        frozen, trained = recipe.model.frozen_layers, sizes if costs.sends_back else heads
        if frozen:
            trained = sizes[len(stem_parameters(dataclasses.replace(shape, layers=frozen))) :]
        if rank := recipe.adapter_rank:  # on all linear layers of a block; fewer where lora_targets says so
            linears = (*shape.attention, *shape.feed_forward)
            ends = [rank * end for each in linears for end in (each.inputs, each.outputs)]
            trained = ends * (shape.layers - frozen)
            sizes = sizes + trained
        return cls(
            shape,
            parameters=sum(sizes),
            trained=sum(trained),
            divided=sum(size for size in sizes if size > PERSISTENT_ELEMENTS),
            whole=sum(size for size in trained if size <= PERSISTENT_ELEMENTS),
            by_muon=sum(_matrices(recipe, shape)) if recipe.optim.name == "muon" else 0.0,
            guide=guide,
        )


def _matrices(recipe: Recipe, shape: Shape) -> list[int]:
    """Elements of the trained matrices that take hidden states to hidden states."""
    costs = costs_of(recipe)
    if not costs.sends_back:
        return costs.head_parameters(shape)[::2]
    frozen = recipe.model.frozen_layers
    projection = [shape.table_width * shape.hidden] if shape.table_width and not frozen else []
    return layer_matrices(shape) * (shape.layers - frozen) + projection + costs.own_matrices(shape)


@dataclass(frozen=True)
class Lengths:
    """Mean tokens of a text, special tokens included. All texts are taken to be of mean length.

    special: how many of them the tokenizer puts around a text.
    """

    document: float
    query: float
    passage: float
    special: int = 2

    @classmethod
    def longest(cls, recipe: Recipe) -> Lengths:
        data = recipe.data
        return cls(data.max_length, data.query_max_length, data.passage_max_length)


def texts_of(recipe: Recipe, samples: float, lengths: Lengths) -> Texts:
    """The texts of that many samples: documents, two spans each, or queries with their positives and hard negatives."""
    if recipe.reads_documents:
        count = samples * (2 if recipe.pairs == "spans" else 1)
        return Texts.alike(count, lengths.document, special=lengths.special)
    queries = Texts.alike(samples, lengths.query, special=lengths.special)
    passages = samples * (recipe.data.num_positives + recipe.data.num_negatives)
    return queries + Texts.alike(passages, lengths.passage, special=lengths.special)


# --- memory ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU at the peak of a step."""

    states: float  # weights, gradients, masters, moments; a guide's weights
    buckets: float  # DeepSpeed's reduction bucket, and the fused loss's float32 gradient of the table
    activations: float  # kept for backward, of one micro-batch
    loss: float  # blocks of logits or scores, embeddings and their gradients
    context: float

    @property
    def total(self) -> float:
        return sum(dataclasses.astuple(self))


def state_bytes(model: Model, stage: int, ranks: int) -> float:
    """Weights, gradients, masters and moments on one rank while a step is taken."""
    kept = STAGE_CONFIGS[stage]
    shared = kept.divided / (ranks if stage else 1)
    weights = kept.weights * model.parameters
    if stage == 3:
        frozen = model.parameters - model.trained  # a rank's share of these is not in kept.divided
        weights = kept.weights * (min(model.parameters, LIVE_ELEMENTS) + frozen / ranks)
    return weights + model.trained * (kept.gradients + shared) - _spared_bytes(model, stage, ranks)


def resting_bytes(model: Model, stage: int, ranks: int, *, kept: Stage | None = None) -> float:
    """What of `state_bytes` is left between steps. kept: in place of the shipped configuration of the stage."""
    kept = kept or STAGE_CONFIGS[stage]
    own, divided = kept.rests
    whole = model.parameters - (model.divided if stage == 3 else 0.0)
    weights = kept.weights * (whole + (model.parameters - whole) / ranks)
    bucket = kept.bucket * BUCKET_ELEMENTS if stage == 3 else 0.0
    return weights + model.trained * (own + divided / ranks) - _spared_bytes(model, stage, ranks) + bucket


def _spared_bytes(model: Model, stage: int, ranks: int) -> float:
    """What one rank does not keep of Adam's moments, because Muon steps a part of the parameters."""
    return MUON_SPARES * model.by_muon / (ranks if stage else 1)


def memory_of(
    costs: ObjectiveCosts, model: Model, *, stage: int, ranks: int, share: Texts, micro: Texts, assumed: Assumptions
) -> Memory:
    """share: the rank's texts of a step; micro: of its largest micro-batch."""
    vectors = costs.vectors(share) * ranks
    states = state_bytes(model, stage, ranks) + (2.0 * model.parameters if stage == 0 else 0.0)
    width = _activation_width(stage)
    activations = costs.activation_bytes(model.shape, micro, width=width)
    # Kept graphs are gone before a micro-batch is embedded again.
    activations = max(activations, costs.kept * costs.activation_bytes(model.shape, share, width=width))
    loss = costs.loss_bytes(share, vectors=vectors)
    if model.guide is not None:
        # Its activations are gone before the student's are kept.
        states += model.guide.bytes
        loss += 4.0 * model.guide.shape.hidden * (share.count + costs.vectors_held(share, vectors))
    return Memory(
        states=states,
        buckets=STAGE_CONFIGS[stage].bucket * BUCKET_ELEMENTS + costs.table_gradient_bytes(model.shape),
        activations=activations
        # Gradients alive inside the layer that is sent back.
        + (2.0 * micro.tokens * wide_gradients(model.shape) if costs.sends_back else 0.0),
        loss=loss,
        context=assumed.context_bytes,
    )


def _activation_width(stage: int) -> float:
    """Bytes of an activation's element. Under autocast, at stage 0, norms and residuals stay in float32."""
    return 3.0 if stage == 0 else 2.0


# --- communication -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Collective:
    """`bytes` of the tensor that is whole on every rank, in `calls` calls a step."""

    kind: str  # all_reduce | all_gather | reduce_scatter | ring and ring_back: vectors and gradients (trainer/ring.py)
    bytes: float
    calls: float = 1.0

    def sent(self, ranks: int) -> float:
        """Bytes that each rank sends, in a ring (Patarasuk and Yuan 2009)."""
        if self.kind == "ring":
            return ring_vectors_sent(ranks) / ranks * self.bytes
        if self.kind == "ring_back":
            return ring_gradients_sent(ranks) / ranks * self.bytes
        return (2 if self.kind == "all_reduce" else 1) * (ranks - 1) / ranks * self.bytes


def collectives(
    recipe: Recipe, model: Model, *, stage: int, micro_batches: float, vectors: float, kept: Stage | None = None
) -> list[Collective]:
    """What a step calls.

    vectors: of the global batch, with which a rank's own are compared. kept: in place of the shipped configuration of
    the stage.

    DeepSpeed's stages 1 and 2 reduce gradients by all-reduce, of which each rank keeps its part. Stages 2 and 3 with
    bf16 weights reduce at every micro-batch. Stage 3 gathers the divided weights once a forward and keeps them for its
    backward; with gradient caching, whose first pass has no backward, three times a micro-batch. The objective's own
    modules then run in the second pass alone, which keeps their weights; the first fetches them ahead, for nothing. Of
    a large model a pass keeps only the last weights, whose backward begins within LIVE_ELEMENTS, and gathers the others
    a second time. Where no gradient flows through the encoder, its weights are gathered once a forward pass.
    """
    kept, costs = kept or STAGE_CONFIGS[stage], costs_of(recipe)
    times = micro_batches if kept.reduces_each_micro_batch else 1.0
    kind = "reduce_scatter" if stage == 3 else "all_reduce"
    buckets = max(1.0, model.trained / BUCKET_ELEMENTS)
    found = [Collective(kind, times * kept.sent_gradient * model.trained, times * buckets)]
    if stage in (1, 2):
        found.append(Collective("all_gather", kept.sent_weights * model.trained, 2))
    if stage == 3:
        again = max(0.0, 1 - LIVE_ELEMENTS / 2 / model.divided) if model.divided and costs.sends_back else 0.0
        gathers = micro_batches * (1 + again if not costs.caches else 3 if costs.sends_back else 2)
        own = sum(size for size in costs.own_parameters(model.shape) if size > PERSISTENT_ELEMENTS)
        elements = gathers * model.divided - (micro_batches * own if costs.caches else 0.0)
        # Parameters one by one, about a matrix a call.
        found.append(Collective("all_gather", kept.sent_weights * elements, gathers * model.shape.layers))
        found.append(Collective("all_gather", kept.sent_weights * model.whole))
    if gathered := costs.gathered_bytes(vectors):
        there, back = ("ring", "ring_back") if costs.exchange == "ring" else ("all_gather", "reduce_scatter")
        found += [Collective(there, gathered), Collective(back, gathered)]
        if model.guide is not None:
            found.append(Collective(there, 4.0 * vectors * model.guide.shape.hidden))
    if summed := costs.summed_bytes():
        found.append(Collective("all_reduce", summed, len(costs.sizes)))
    return found


def collective_seconds(each: Collective, cluster: Cluster, assumed: Assumptions) -> float:
    """Latency and bandwidth (Thakur et al. 2005): what all ranks wait for, nothing overlapped.

    Rings run through all GPUs of a node and leave it once, so the slower of the link between GPUs and the node's
    adapters together sets the rate; messages go by a ring or, for latency, a double tree (Sanders et al. 2009; NCCL).
    """
    ranks = cluster.ranks
    if ranks == 1 or each.bytes == 0:
        return 0.0
    rates = [cluster.gpu.link_bandwidth] if cluster.gpus_per_node > 1 else []
    rates += [cluster.link.bandwidth] if cluster.nodes > 1 else []
    if each.kind.startswith("ring"):  # of both rounds, or of the second, whose messages go together
        slowest = cluster.link.latency if cluster.nodes > 1 else NODE_LATENCY
        messages = RING_CHUNKS * (ranks - 1) * (2 if each.kind == "ring" else 0)
        return each.sent(ranks) / (min(rates) * assumed.link_share) + each.calls * messages * slowest
    rounds = 2 if each.kind == "all_reduce" else 1
    inside, between = cluster.gpus_per_node - 1, cluster.nodes - 1
    ring = rounds * (cluster.nodes * inside * NODE_LATENCY + between * cluster.link.latency)
    tree = 2 * (inside * NODE_LATENCY + math.ceil(math.log2(cluster.nodes)) * cluster.link.latency)
    return each.sent(ranks) / (min(rates) * assumed.link_share) + each.calls * min(ring, tree)


# --- the step ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prediction:
    """One step on one cluster, at one stage and micro-batch size."""

    nodes: int
    gpus: int
    stage: int
    global_batch_size: int
    micro_batch_size: int
    micro_batches: int  # a step, on the fullest rank
    memory: Memory
    fits: bool
    sent_bytes: float  # a rank, a step
    compute_seconds: float
    communication_seconds: float
    step_seconds: float
    mfu: float
    tokens_per_second: float

    def days(self, tokens: float) -> float:
        return tokens / self.tokens_per_second / 86400


def moved_bytes(
    costs: ObjectiveCosts, model: Model, texts: Texts, *, stage: int, ranks: int, micro_batches: float
) -> float:
    """Through the GPU's memory, by all that is no matrix product: objective, sums of gradients, optimizer.

    Under stage 0's autocast every forward pass of a micro-batch reads the float32 weights, and writes them in bf16.
    """
    guide = model.guide.shape if model.guide is not None else None
    total = costs.moved_bytes(model.shape, texts, guide=guide)
    if stage == 0:
        matrices = model.parameters - sum(embedding_parameters(model.shape))
        total += (4 + 2) * matrices * micro_batches * costs.forward_passes
    share = model.trained / (ranks if stage else 1)
    accumulation = (10 if stage == 1 else 12) * model.trained * micro_batches
    return total + accumulation + 30 * share  # Adam: weight, two moments, gradient, new weights


def predict(
    recipe: Recipe,
    model: Model,
    cluster: Cluster,
    *,
    stage: int,
    micro_batch_size: int,
    lengths: Lengths,
    assumed: Assumptions,
) -> Prediction:
    ranks, batch, gpu = cluster.ranks, recipe.train.global_batch_size, cluster.gpu
    whole = texts_of(recipe, batch, lengths)
    # The fullest rank, for which the others wait.
    share = texts_of(recipe, math.ceil(batch / ranks), lengths)
    costs = costs_of(recipe)
    budget = micro_batch_size * recipe.longest_text
    micro_batches = max(1, math.ceil(share.tokens / budget)) if costs.cuts else 1
    part = min(1.0, budget / share.tokens) if costs.cuts else 1.0
    micro = share.part(part)
    width = _activation_width(stage)
    costs = with_kept_graphs(costs, model.shape, micro=micro, micro_batches=micro_batches, width=width)
    vectors = costs.vectors(whole)
    products = costs.computed_flops(model.shape, share, vectors=vectors)
    launches = costs.encoder_passes * len(costs.passes(model.shape)) * model.shape.layers * kernels(model.shape)
    if model.guide is not None:
        products += costs.guide_flops(model.guide.shape, share, vectors=vectors)
        launches += model.guide.shape.layers * kernels(model.guide.shape)
    moved = moved_bytes(costs, model, share, stage=stage, ranks=ranks, micro_batches=micro_batches)
    busy = products / (gpu.peak_flops * assumed.matrix_share)
    busy += moved / (gpu.memory_bandwidth * assumed.memory_share)
    # Small micro-batches wait for the host, which launches kernel by kernel in eager mode.
    host = micro_batches * launches * assumed.launch_seconds
    compute = max(busy, host)
    calls = collectives(recipe, model, stage=stage, micro_batches=micro_batches, vectors=vectors)
    communication = sum(collective_seconds(each, cluster, assumed) for each in calls)
    seconds = compute + communication
    memory = memory_of(costs, model, stage=stage, ranks=ranks, share=share, micro=micro, assumed=assumed)
    return Prediction(
        nodes=cluster.nodes,
        gpus=ranks,
        stage=stage,
        global_batch_size=batch,
        micro_batch_size=micro_batch_size,
        micro_batches=micro_batches,
        memory=memory,
        fits=memory.total <= PLANNED_MEMORY * gpu.memory,
        sent_bytes=sum(each.sent(ranks) for each in calls),
        compute_seconds=compute,
        communication_seconds=communication,
        step_seconds=seconds,
        mfu=costs.model_flops(model.shape, whole) / (seconds * ranks * gpu.peak_flops),
        tokens_per_second=whole.tokens / seconds,
    )


def micro_batch_sizes(recipe: Recipe, samples_per_rank: int) -> list[int]:
    """Powers of two up to the first that holds the whole share; the share alone where a step does not cut it."""
    if not costs_of(recipe).cuts:
        return [samples_per_rank]
    return [2**power for power in range(max(1, samples_per_rank - 1).bit_length() + 1)]


def stages_for(recipe: Recipe) -> tuple[int, ...]:
    """The stages whose shipped configurations a recipe can train with (trainer/ds_config.py)."""
    narrower = not recipe.ladder.has_whole_feed_forwards
    without = {2: recipe.optim.name == "muon", 3: narrower or recipe.train.compile}
    return tuple(stage for stage in STAGES if not without.get(stage))


def best_of_stage(
    recipe: Recipe, model: Model, cluster: Cluster, *, stage: int, lengths: Lengths, assumed: Assumptions
) -> Prediction:
    """The fastest micro-batch size that fits; where none does, the smallest, which then says what it would need."""
    samples = math.ceil(texts_of(recipe, recipe.train.global_batch_size, lengths).count / cluster.ranks)
    options = [
        predict(recipe, model, cluster, stage=stage, micro_batch_size=size, lengths=lengths, assumed=assumed)
        for size in micro_batch_sizes(recipe, samples)
    ]
    fitting = [option for option in options if option.fits]
    return min(fitting, key=lambda option: option.step_seconds) if fitting else options[0]


def recommended(predictions: Sequence[Prediction]) -> Prediction | None:
    """The fastest stage that fits; a lower one unless a higher is faster by a hundredth."""
    fitting = [each for each in predictions if each.fits]
    if not fitting:
        return None
    fastest = min(each.step_seconds for each in fitting)
    return next(each for each in fitting if each.step_seconds <= 1.01 * fastest)
