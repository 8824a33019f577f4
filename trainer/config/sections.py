"""The sections of a recipe: every key with its type, default, bounds, choices, and what it does.

This is the one place for all of that: `--help`, docs/recipe.md and the JSON schema for editors are made from it
(trainer/config/reference.py). Torch-free, because login nodes check and submit recipes without a GPU stack.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from models.choices import Direction, Pooling, Similarity
from models.sizes import STARBUCKS_LADDER

LEAST_LENGTH = 4  # tokens of a text, special ones included
# Upper bounds far beyond any sensible value, and within the range of 64-bit counts, float32 and a machine's memory.
_STEPS, _TOKENS, _TEXTS, _LAYERS = 10**12, 2**24, 2**24, 2**16
_LARGEST = 1e6
# The least divisor, so that none becomes 0 in float32.
_SMALLEST_DIVISOR = 1e-6

NegativeBlock = Literal["query_passage", "query_query", "passage_passage", "passage_query"]

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


@dataclass(frozen=True, config=STRICT)
class RunConfig:
    """The run itself: where it goes, its seed, and whether it goes on from what is there."""

    output: str = Field(default="runs/run", description="The run's folder.")
    seed: int = Field(
        default=42, ge=0, le=2**64 - 1, description="Seed of the data's order, of masks, dropout and fresh weights."
    )
    resume: Literal["never", "auto", "required"] = Field(
        default="never",
        description="never refuses a folder that holds a run; auto goes on from its newest checkpoint, or starts; "
        "required goes on or fails.",
    )


@dataclass(frozen=True, config=STRICT)
class ModelConfig:
    """The encoder, the sizes it is trained at, and which of its weights train."""

    source: str = Field(
        default="",
        description="Folder or hub name of a Hugging Face encoder or decoder; empty starts from random weights by "
        "`config`.",
    )
    config: dict[str, Any] = Field(
        default_factory=dict, description="model_type and that family's own keys, for a model from random weights."
    )
    pooling: Pooling = Field(
        default="cls",
        description="How a text's token vectors become one vector: the first token's, their mean, the last token's, or "
        "their mean with weights that grow with the position.",
    )
    pool_prompt: bool = Field(
        default=True, description="Whether the mean takes the tokens of a text's prompt, too (docs/backbones.md)."
    )
    direction: Literal["", Direction] = Field(
        default="",
        description="What a token of a decoder reads: those before it (causal), or all (bidirectional). It must be set "
        "for decoders; encoders are bidirectional.",
    )
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2", "packed"] = Field(
        default="auto",
        description="The implementation of attention; packed computes no padding (docs/performance.md), and auto takes "
        "the fastest that the model and the machine have.",
    )
    ladder: list[list[int | float]] = Field(
        default_factory=lambda: [list(size.numbers) for size in STARBUCKS_LADDER],
        description="The sizes, each [layers, dimensions], from the smallest to the full one; with a third number, "
        "such as [6, 384, 0.25], a size has that fraction of each feed-forward (docs/resize.md).",
    )
    trains: Literal["all", "heads"] = Field(
        default="all",
        description="heads trains the linear maps after each depth alone, so that a depth without one stays as it is.",
    )
    dropout: float = Field(
        default=-1.0,
        le=0.99,
        description="Every dropout probability of the encoder; below 0 it is what its config says.",
    )
    output_dim: int = Field(
        default=0,
        ge=0,
        le=2**20,
        description="Dimensions at which the ladder of a reduced-dimension model ends; 0 means the encoder's own.",
    )
    frozen_layers: int = Field(
        default=0, ge=0, le=_LAYERS, description="With k above 0, the embeddings and the first k layers do not train."
    )
    lora_rank: int = Field(
        default=0,
        ge=0,
        le=_LAYERS,
        description="Above 0, adapters of this rank train and the weights do not; needs peft.",
    )
    lora_alpha: float = Field(
        default=16.0, gt=0, le=_LARGEST, description="An adapter's product is multiplied by lora_alpha / lora_rank."
    )
    lora_dropout: float = Field(default=0.0, ge=0, lt=1, description="Dropout probability before an adapter.")
    lora_targets: list[str] = Field(
        default_factory=list,
        description='Linear layers that get adapters, such as "query"; none means all linear layers of the blocks.',
    )


@dataclass(frozen=True, config=STRICT)
class DataConfig:
    """Which shards are read, how they are mixed, and how long their texts may be.

    With one folder, `weights`, `mixture_temperature` and `batches` change nothing. They are accepted all the same. A
    chain may replace the folder by its parts, among which the last two choose, and one weight for one folder is a
    complete list of weights.
    """

    shards: list[str] = Field(default_factory=list, description="Folders written by `python -m data.prepare`.")
    weights: list[float] = Field(
        default_factory=list, description="Weight of each folder in the mixture; none means by its number of samples."
    )
    mixture_temperature: float = Field(
        default=1.0,
        ge=1,
        le=1e9,
        description="Without weights, a folder's share grows with samples^(1 / this): 1 is by samples, and a large "
        "number makes all alike.",
    )
    batches: Literal["mixed", "one_dataset"] = Field(
        default="mixed", description="one_dataset takes every global batch from one folder, the folders in turn."
    )
    no_duplicates: bool = Field(
        default=False,
        description="No text twice in a global batch: samples change places with those of nearby batches.",
    )
    max_length: int = Field(
        default=512, ge=LEAST_LENGTH, le=_TOKENS, description="Tokens of a pre-training text, special tokens included."
    )
    query_max_length: int = Field(
        default=64,
        ge=LEAST_LENGTH,
        le=_TOKENS,
        description="Tokens of a query, its prompt and special tokens included.",
    )
    passage_max_length: int = Field(
        default=256,
        ge=LEAST_LENGTH,
        le=_TOKENS,
        description="Tokens of a passage, its prompt and special tokens included.",
    )
    query_prompts: list[str] = Field(
        default_factory=list, description="What stands before queries: none, one for all folders, or one for each."
    )
    passage_prompts: list[str] = Field(
        default_factory=list, description="What stands before passages: none, one for all folders, or one for each."
    )
    num_positives: int = Field(
        default=1,
        ge=1,
        le=2**16,
        description="Positives of a query that all count, each for its share of the query's loss, drawn from those in "
        "the shards.",
    )
    num_negatives: int = Field(
        default=0, ge=0, le=2**16, description="Hard negatives of a query, drawn from those in the shards."
    )
    negatives_from: list[float] = Field(
        default_factory=list, description="Share of the training at which each negative joins; none means at once."
    )
    num_workers: int = Field(default=1, ge=0, le=1024, description="Processes that read data, for each rank.")
    shuffle: bool = Field(default=True, description="False reads the samples in the shards' order, in every epoch.")
    cache_dir: str = Field(
        default="",
        description="Where remote shards and marks of verified ones are kept; empty means the temporary folder.",
    )
    cache_gib: float = Field(
        default=32.0,
        gt=0,
        le=2**30,
        description="GiB of remote shards on this machine; the least recently used make room.",
    )
    verify: Literal["first_read", "size"] = Field(
        default="first_read",
        description="first_read hashes a shard once on each machine; size looks at its length alone.",
    )
    bad_shards: Literal["refuse", "skip"] = Field(
        default="refuse", description="skip reads other samples in place of those of a missing or damaged shard."
    )


def _passages_alone() -> list[NegativeBlock]:
    return ["query_passage"]


@dataclass(frozen=True, config=STRICT)
class ObjectiveConfig:
    """The training objective: its task, its losses, and the sizes at which they are computed."""

    name: str = Field(
        default="",
        description="The task: masked language modelling (masked), contrastive fine-tuning (contrastive), learning "
        "from a teacher (distill), or an objective that another package brings (docs/objectives.md).",
        # Editors complete these; installed packages may have others.
        json_schema_extra={"anyOf": [{"enum": ["", "masked", "contrastive", "distill"]}, {"type": "string"}]},
    )
    own: dict[str, Any] = Field(
        default_factory=dict, description="Settings of an objective of another package, which checks them itself."
    )
    sizes: Literal[
        "ladder",
        "grid",
        "full",
        "one",
        "mrl",
        "adaptive_layers",
        "two_d",
        "two_d_listed",
        "two_d_all_widths",
        "espresso",
        "espresso_full_width",
    ] = Field(
        default="ladder",
        description="The sizes of a step: the ladder; each of its depths with each of its widths (grid); the full "
        "size; one size; every width at full depth (mrl); every depth at full width (adaptive_layers); sizes that "
        "each step draws (two_d, two_d_listed, two_d_all_widths; docs/objectives.md); or every layer of the encoder "
        "with the ladder's smaller widths (espresso), and with the full width (espresso_full_width).",
    )
    size: str = Field(
        default="", description='For sizes = "one": LAYERSxDIMENSIONS; the encoder is cut to so many layers.'
    )
    preset: Literal["", "paper", "released-code"] = Field(
        default="",
        description="Keys that the recipe does not set get the values of the Starbucks paper, or of its code.",
    )
    preset_for: Literal["", "retrieval", "sts"] = Field(
        default="", description="The fine-tuning task whose values the preset gives; empty for masked."
    )
    reduction: Literal["mean", "sum"] = Field(
        default="mean", description="Whether the losses of the sizes are averaged or added."
    )
    layer_weighting: Literal["uniform", "log", "linear"] = Field(
        default="uniform",
        description="What the loss of a size of n layers below the last is multiplied by: 1, 1 / (1 + ln n) or 1 / n.",
    )
    size_weights: list[float] = Field(
        default_factory=list, description="Factors of the sizes' losses, in the ladder's order; none means 1 each."
    )
    encoder_mask_ratio: float = Field(
        default=0.2, gt=0, lt=1, description="Share of the tokens that the encoder does not see."
    )
    decoder_mask_ratio: float = Field(
        default=0.4,
        gt=0,
        lt=1,
        description="Share of the tokens that the decoder does not see; in enhanced decoding, the share of the other "
        "tokens that each position does not see.",
    )
    decoder: bool = Field(
        default=True, description="False is masked language modelling at each size, without an autoencoder."
    )
    decoding: Literal["basic", "enhanced"] = Field(
        default="basic", description="enhanced predicts every token, each from its own sample of the others (RetroMAE)."
    )
    bottleneck: Literal["head", "cls"] = Field(
        default="head",
        description="What stands at the decoder's position 0: head(CLS) as in SMAE, or CLS itself as in RetroMAE.",
    )
    nested_masks: bool = Field(
        default=True, description="Whether words that are masked for the encoder are masked for the decoder, too."
    )
    pairs: Literal["none", "spans", "tuples"] = Field(
        default="none",
        description="A contrastive term beside masked losses: between two spans of a document (spans), or a query "
        "and its passages (tuples).",
    )
    symmetric_spans: bool = Field(
        default=False, description='With pairs = "spans", each span is a query once, against all others (coCondenser).'
    )
    pair_weight: float = Field(
        default=1.0, gt=0, le=_LARGEST, description="Weight of the contrastive term beside masked losses."
    )
    loss_scale: float = Field(
        default=1.0,
        gt=0,
        le=_LARGEST,
        description="Multiplies the masked losses; the paper's code halves L_enc + L_dec (0.5).",
    )
    loss: Literal["infonce", "cosent"] = Field(
        default="infonce", description="The contrastive loss: InfoNCE over the global batch, or CoSENT of graded pairs."
    )
    similarity: Similarity = Field(default="cosine", description="How two vectors are compared.")
    temperature: float = Field(default=0.05, ge=_SMALLEST_DIVISOR, le=_LARGEST, description="Divides the similarities.")
    kl: Literal["scores", "coordinates", "margins", "none"] = Field(
        default="scores",
        description="What a size learns from the teacher: its scores, its coordinates, its margins on hard negatives "
        "(MarginMSE), or nothing.",
    )
    kl_weight: float = Field(default=1.0, ge=0, le=_LARGEST, description="Weight of the loss that `kl` names.")
    kl_teacher: Literal["full", "guide"] = Field(
        default="full",
        description="Whose scores are learnt: the full size's, or the guide's, by every size, the full one too.",
    )
    kl_size_weights: list[float] = Field(
        default_factory=list, description="Factors of `kl_weight`, one for each size that learns; none means 1 each."
    )
    kl_temperature: float = Field(
        default=1.0, ge=_SMALLEST_DIVISOR, le=_LARGEST, description='With kl = "coordinates", divides the coordinates.'
    )
    detach_teacher: bool = Field(
        default=True, description="Whether the loss that `kl` names sends no gradient to the teacher."
    )
    asymmetric_weight: float = Field(
        default=0.0,
        ge=0,
        le=_LARGEST,
        description="Weight of InfoNCE of every smaller size's queries against the full size's passages, cut to the "
        "size's dimensions; beside the weight of the size's own loss.",
    )
    spread_weight: float = Field(
        default=0.0,
        ge=0,
        le=_LARGEST,
        description="Weight of the mean squared similarity of different queries, plus that of different positives, in "
        "the global batch; beside the weight of the size's own loss.",
    )
    compression_weight: float = Field(
        default=0.0,
        ge=0,
        le=_LARGEST,
        description="Weight of ESE's distance from a narrow size's coordinates to the principal components of the same "
        "layer's whole vectors, within the global batch; beside the weight of the size's own loss.",
    )
    compression_temperature: float = Field(
        default=1.0,
        ge=_SMALLEST_DIVISOR,
        le=_LARGEST,
        description="In the KL of ESE's distance, divides the coordinates; also multiplies the KL.",
    )
    negatives: list[NegativeBlock] = Field(
        default_factory=_passages_alone,
        description="What shares the denominator with a query and its positive: the query with other passages, which "
        "is always there, or with other queries; the positive with other passages or with other queries.",
    )
    hardness: float = Field(
        default=0.0,
        ge=0,
        le=1e3,
        description="With a above 0, a query's own hard negatives weigh exp(a · similarity) in its denominator.",
    )
    mask_false_negatives: bool = Field(
        default=True, description="Leave out passages that are known not to be negatives of a query."
    )
    filter_false_negatives: bool = Field(
        default=False, description="Leave out passages that score above the query's positive less the margin."
    )
    filter_by: Literal["full", "guide"] = Field(
        default="full", description="Whose scores filter: the full size's, or those of [guide]."
    )
    false_negative_margin: float = Field(
        default=0.0,
        le=_LARGEST,
        description="The filter's margin, in units of the similarity; below 0, fewer passages are left out.",
    )
    backward: Literal["grad_cache", "direct"] = Field(
        default="grad_cache",
        description="grad_cache computes large batches in micro-batches, exactly, with a second forward pass; direct "
        "keeps the whole batch's graph.",
    )


@dataclass(frozen=True, config=STRICT)
class GuideConfig:
    """A frozen encoder that says which passages are no negatives, or whose scores are learnt."""

    model: str = Field(
        default="",
        description="Folder or hub name of the encoder; without a store it must have the shards' tokenizer.",
    )
    store: str = Field(
        default="",
        description="Folder of its vectors, which are read in place of its passes; written by `python -m "
        "trainer.teacher_vectors`.",
    )
    pooling: Literal["", Pooling] = Field(default="", description="Its pooling; empty means as its folder says.")
    temperature: float = Field(
        default=0.0,
        ge=0,
        le=_LARGEST,
        description="Divides its scores where it teaches; 0 means as its barista.json says.",
    )


@dataclass(frozen=True, config=STRICT)
class TeacherConfig:
    """A frozen encoder whose vectors are learnt at every size."""

    model: str = Field(default="", description="Folder or hub name of the encoder; empty means model.source as it is.")
    pooling: Literal["", Pooling] = Field(default="", description="Its pooling; empty means as its folder says.")
    vectors: Literal["live", "stored"] = Field(
        default="live",
        description="live computes its vectors at each step; stored reads them from `store`, of any model.",
    )
    store: str = Field(default="", description="Folder written by `python -m trainer.teacher_vectors`.")
    vector_weight: float = Field(
        default=1.0,
        ge=0,
        le=_LARGEST,
        description="Weight of 1 minus the cosine to the teacher's vector, cut to the size's width.",
    )
    similarity_weight: float = Field(
        default=0.0, ge=0, le=_LARGEST, description="Weight of the KL of the similarities within the global batch."
    )
    gram_weight: float = Field(
        default=0.0,
        ge=0,
        le=_LARGEST,
        description="Weight of the squared error of the similarities within the global batch.",
    )
    order_weight: float = Field(
        default=0.0,
        ge=0,
        le=_LARGEST,
        description="Weight of the loss of their order, by triples of the global batch's texts.",
    )
    temperature: float = Field(
        default=0.05, ge=_SMALLEST_DIVISOR, le=_LARGEST, description="Divides similarities in the KL."
    )
    balance: Literal["texts", "roles"] = Field(
        default="texts",
        description="What weighs the same in these terms: every text of the batch, or its queries, its positives and "
        "its hard negatives, each together.",
    )

    @property
    def terms(self) -> dict[str, float]:
        """The weight of each term, by its name. A term of weight 0 is not computed."""
        kinds = ("vector", "similarity", "gram", "order")
        return {kind: getattr(self, f"{kind}_weight") for kind in kinds}

    @property
    def compares_texts(self) -> bool:
        """Whether a text's gradient depends on the batch's other texts."""
        return any(weight for kind, weight in self.terms.items() if kind != "vector")

    @property
    def gathers(self) -> bool:
        """Whether every rank needs all texts' vectors; Gram matrices are compared through sums over ranks."""
        return bool(self.similarity_weight or self.order_weight)


@dataclass(frozen=True, config=STRICT)
class OptimConfig:
    """The optimizer and the course of its learning rate."""

    name: Literal["adamw", "muon"] = Field(
        default="adamw",
        description="AdamW for all weights, or Muon for the matrices between hidden states and AdamW for the others.",
    )
    lr: float = Field(default=1e-4, gt=0, le=_LARGEST, description="AdamW's highest learning rate.")
    # The defaults of Keller Jordan's Muon, and of DeepSpeed's.
    muon_lr: float = Field(
        default=0.02, gt=0, le=_LARGEST, description="Muon's highest learning rate; it follows the same schedule."
    )
    muon_momentum: float = Field(
        default=0.95, ge=0, lt=1, description="Decay of the gradients' mean that Muon makes orthogonal."
    )
    weight_decay: float = Field(
        default=0.01,
        ge=0,
        le=_LARGEST,
        description="Decoupled weight decay, times each part's own learning rate; biases and norms have none.",
    )
    beta1: float = Field(default=0.9, ge=0, lt=1, description="Decay of the gradients' mean.")
    beta2: float = Field(default=0.999, ge=0, lt=1, description="Decay of the squared gradients' mean.")
    eps: float = Field(default=1e-8, gt=0, le=_LARGEST, description="Added to the denominator of a step.")
    schedule: Literal["linear", "cosine", "constant"] = Field(
        default="linear", description="How the learning rate falls after the warm-up."
    )
    warmup_ratio: float = Field(
        default=0.1, ge=0, lt=1, description="Share of all steps in which the learning rate rises."
    )
    max_grad_norm: float = Field(
        default=1.0, ge=0, le=1e30, description="Gradients are scaled down to this norm; 0 leaves them as they are."
    )


@dataclass(frozen=True, config=STRICT)
class TrainConfig:
    """How long is trained, with which batches, and within which memory."""

    steps: int = Field(default=0, ge=0, le=_STEPS, description="Optimizer steps; 0 means by epochs.")
    epochs: float = Field(default=1.0, le=1e9, description="Passes over the data, where steps is 0.")
    stop_at_step: int = Field(
        default=0,
        ge=0,
        le=_STEPS,
        description="Ends this process after that step, with a checkpoint; the schedule stays that of all steps. 0 "
        "never.",
    )
    stop_after_minutes: float = Field(
        default=0.0,
        ge=0,
        le=1e9,
        description="Ends this process after a step, with a checkpoint and exit code 75; 0 never.",
    )
    hang_seconds: float = Field(
        default=45.0,
        ge=0,
        le=1e9,
        description="Ends the job if no rank makes progress for this long, or for three times the longest pause so "
        "far if that is more; 0 never.",
    )
    max_skipped_steps: int = Field(
        default=5,
        ge=1,
        le=_STEPS,
        description="Gives up after so many steps in a row without a finite loss and gradient.",
    )
    global_batch_size: int = Field(default=128, ge=1, le=_TEXTS, description="Texts, or queries, of an optimizer step.")
    micro_batch_size: int = Field(
        default=32,
        ge=1,
        le=_TEXTS,
        description="Texts in a micro-batch of a rank if all have the longest length; of shorter texts more fit. With "
        'objective.backward = "direct", only the passes of a guide or a teacher have micro-batches.',
    )
    activation_memory_mib: float = Field(
        default=0.0,
        ge=0,
        le=_LARGEST,
        description="MiB of activations that gradient caching may keep, so that it embeds fewer texts twice.",
    )
    activation_checkpointing: bool = Field(
        default=False, description="Keeps one activation a layer and computes the others again."
    )
    compile: bool = Field(
        default=False,
        description="torch.compile of the encoder: minutes at the start, worth it in long runs; not with ZeRO stage 3.",
    )
    logits_memory_mib: float = Field(
        default=64.0, gt=0, description="MiB of the largest block of vocabulary logits that is held at once."
    )
    score_memory_mib: float = Field(
        default=256.0, gt=0, description="MiB of the largest block of query-passage scores that is held at once."
    )
    negatives_exchange: Literal["auto", "gather", "ring"] = Field(
        default="auto",
        description="How other ranks' passages reach a rank's queries: gather holds them all on every rank; ring holds "
        "a rank's share, which travels; auto is ring where they and their gradients take more than 2 GiB.",
    )


@dataclass(frozen=True, config=STRICT)
class EngineConfig:
    """DeepSpeed."""

    ds_config: str = Field(
        default="ds_configs/zero1.json", description="A file of ds_configs/: ZeRO stage and precision."
    )


@dataclass(frozen=True, config=STRICT)
class CheckpointConfig:
    """When checkpoints are written, and which are kept."""

    every_steps: int = Field(default=1000, ge=1, le=_STEPS, description="Steps between checkpoints.")
    keep: int = Field(default=2, ge=1, le=_STEPS, description="How many of the newest are kept.")
    keep_every_steps: int = Field(
        default=0, ge=0, le=_STEPS, description="Checkpoints of every so many steps are kept for good; 0 keeps none."
    )
    overlap: bool = Field(
        default=True,
        description="Writes a copy in host memory while training goes on: 12 bytes a parameter, over all ranks.",
    )


@dataclass(frozen=True, config=STRICT)
class LogConfig:
    """What is written down while a run trains, and where."""

    every_steps: int = Field(default=10, ge=1, le=_STEPS, description="Steps between lines of metrics.jsonl.")
    tensorboard: bool = Field(default=True, description="Writes <run>/tensorboard.")
    wandb: bool = Field(default=False, description="Sends the metrics to Weights & Biases; needs the package wandb.")
    mlflow: bool = Field(
        default=False,
        description="Sends the metrics to MLflow; needs the package mlflow, and the server's address in "
        "MLFLOW_TRACKING_URI.",
    )
    spike_deviations: float = Field(
        default=6.0,
        ge=0,
        le=1e9,
        description="A loss this many standard deviations above the running mean is logged as a spike; 0 logs none.",
    )
    samples: bool = Field(default=False, description="Writes the samples of each step to samples/rank_*.jsonl.")


@dataclass(frozen=True, config=STRICT)
class EvaluationConfig:
    """Evaluation during training."""

    every_steps: int = Field(
        default=0, ge=0, le=_STEPS, description="Steps between evaluations; 0 never during training."
    )
    sts: list[str] = Field(default_factory=list, description="STS files.")
    beir: list[str] = Field(default_factory=list, description="BEIR folders.")
    split: str = Field(default="test", description="The judgements to take: qrels/<split>.tsv of each BEIR folder.")
    max_documents: int = Field(
        default=0,
        ge=0,
        le=_STEPS,
        description="Documents of a BEIR corpus, the judged ones always among them; 0 means all.",
    )
    grid: bool = Field(
        default=False, description="Scores every pair of the ladder's layers and dimensions, for the heat map."
    )


@dataclass(frozen=True, config=STRICT)
class DebugConfig:
    """Looking for what went wrong."""

    replay: int = Field(
        default=0,
        ge=0,
        le=_STEPS,
        description="Repeats this step of the run in run.output, in float32, to find a fault, instead of training; "
        "0 trains.",
    )


@dataclass(frozen=True, config=STRICT)
class Sections:
    """All that a recipe says, section by section."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    guide: GuideConfig = field(default_factory=GuideConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)
