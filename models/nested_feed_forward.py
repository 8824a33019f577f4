"""Nested feed-forwards: the first neurons of every feed-forward are one of their own (MatFormer, arXiv:2310.07707).

A feed-forward of inner width m has matrices into its neurons, and one out of them. At a fraction f only the first f · m
neurons run. Their matrices are views of the whole ones, so a gradient falls on the first rows and columns of the whole
parameters, and is zero elsewhere. How much a prefix keeps depends on the order of the neurons: `sort` puts the most
important ones first, which leaves the model's function as it was.

The matrices are found by their shapes, whatever a family calls them: the one out of the neurons is the layer's only
linear layer that reads m elements and gives the hidden width, and those into the neurons are the linear layers nearest
to it that read the hidden width and give m elements, or 2 m where gate and value are one matrix (ModernBERT, Phi-3). Of
such a matrix, a fraction has the first rows of each half.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from models.backbone import encoder_layers
from models.sizes import ModelError, Size

# The key of a configuration that has the inner width; DistilBERT calls it by the second.
_WIDTHS = ("intermediate_size", "hidden_dim")
# A fraction is a decimal number, so its product with a width is whole but for rounding.
_ROUNDING = 1e-6
_PARAMETERS = ("weight", "bias")  # of a linear layer


@dataclass(frozen=True)
class FeedForward:
    """The feed-forward of one layer: its matrices into the neurons, one, two or one of both halves, and that out."""

    into: tuple[nn.Linear, ...]
    out: nn.Linear

    @property
    def neurons(self) -> int:
        return self.out.in_features

    def into_rows(self, values: Tensor, matrix: nn.Linear, rows: slice | Tensor) -> Tensor:
        """The neurons `rows` of a matrix into the neurons, or of its bias: [m or 2 m, ...] -> [rows, ...]."""
        if matrix.out_features == self.neurons:
            return values[rows]
        return torch.cat([half[rows] for half in values.chunk(2)])

    def tensors_of(self, rows: slice | Tensor) -> Iterator[tuple[nn.Linear, str, Tensor]]:
        """(linear layer, name of its parameter, that parameter of the neurons `rows` alone)."""
        for matrix in self.into:
            yield matrix, "weight", self.into_rows(matrix.weight, matrix, rows)
            if matrix.bias is not None:
                yield matrix, "bias", self.into_rows(matrix.bias, matrix, rows)
        yield self.out, "weight", self.out.weight[:, rows]


@dataclass(frozen=True)
class NestedFeedForwards:
    """The feed-forwards of a backbone, layer by layer.

    It holds the modules and no values, so it is true for as long as the backbone's layers are the same.
    """

    layers: tuple[FeedForward, ...]

    @classmethod
    def of(cls, backbone: PreTrainedModel) -> NestedFeedForwards:
        """Those of a backbone; ModelError if some layer's is of another form."""
        width, hidden = inner_width(backbone.config), int(backbone.config.hidden_size)
        return cls(tuple(_found_in(layer, width, hidden, backbone) for layer in encoder_layers(backbone)))

    @property
    def neurons(self) -> int:
        return self.layers[0].neurons

    @contextlib.contextmanager
    def at(self, fraction: float) -> Iterator[None]:
        """Inside, the backbone runs with the first `fraction` of every feed-forward's neurons.

        Modules find views of their parameters where they look for the parameters. The parameters themselves stay
        where they are, so optimizers, engines and checkpoints see the whole ones.
        """
        rows = slice(count_of(fraction, self.neurons))
        views = [] if fraction == 1 else [place for layer in self.layers for place in layer.tensors_of(rows)]
        with _in_place_of_parameters(views):
            yield

    def contexts(self) -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
        """For activation checkpointing (`context_fn`): what a layer's pass and its repetition run in.

        The repetition comes in the backward pass, when no fraction is in force any more. It runs at that of the pass.
        """
        modules = [each for layer in self.layers for each in (*layer.into, layer.out)]
        views = [(each, name, view) for each in modules for name, view in each.__dict__.items() if name in _PARAMETERS]
        return contextlib.nullcontext(), _in_place_of_parameters(views)

    @torch.no_grad()
    def keep(self, rows_of_layers: Sequence[slice | Tensor]) -> None:
        """Keep these neurons of each layer's feed-forward alone, in this order, in place."""
        for layer, rows in zip(self.layers, rows_of_layers, strict=True):
            for module, name, kept in [*layer.tensors_of(rows)]:
                parameter = getattr(module, name)
                setattr(module, name, nn.Parameter(kept.clone(), requires_grad=parameter.requires_grad))
            for matrix in (*layer.into, layer.out):
                matrix.out_features, matrix.in_features = matrix.weight.shape

    @contextlib.contextmanager
    def weighing(self, real: Callable[[Tensor], Tensor]) -> Iterator[list[Tensor]]:
        """Inside, texts run through the backbone; afterwards the list has every neuron's importance to these texts.

        The list has a float64 [neurons] for each layer. A neuron's importance is the sum of its activation's absolute
        value over tokens, times the norm of its outgoing weights. real: activations [..., neurons] -> those of real
        tokens, [tokens, neurons].
        """
        sums = [torch.zeros(self.neurons, dtype=torch.float64) for _ in self.layers]

        def adds_to(total: Tensor) -> Callable[[nn.Module, tuple[Any, ...]], None]:
            def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
                total.add_(real(args[0].detach()).abs().double().sum(0).cpu())

            return hook

        hooks = [layer.out.register_forward_pre_hook(adds_to(total)) for layer, total in zip(self.layers, sums)]
        found: list[Tensor] = []
        try:
            yield found
        finally:
            for each in hooks:
                each.remove()
        found += [
            total * layer.out.weight.detach().double().norm(dim=0).cpu() for layer, total in zip(self.layers, sums)
        ]

    def sort(self, importance: Sequence[Tensor]) -> None:
        """Number each layer's neurons from the most important on, in place; the backbone computes what it did."""
        self.keep([each.argsort(descending=True, stable=True) for each in importance])


@contextlib.contextmanager
def _in_place_of_parameters(views: Sequence[tuple[nn.Module, str, Tensor]]) -> Iterator[None]:
    """Inside, each module finds the view where it looks for its parameter of that name."""
    try:
        for module, name, view in views:
            # An entry of the instance goes before the parameter, which nn.Module looks up last.
            module.__dict__[name] = view
        yield
    finally:
        for module, name, _ in views:
            module.__dict__.pop(name, None)


def inner_width(config: PretrainedConfig) -> int:
    """The neurons of a feed-forward; ModelError if the configuration does not say it."""
    return int(getattr(config, _width_key(config)))


def _width_key(config: PretrainedConfig) -> str:
    for key in _WIDTHS:
        if isinstance(getattr(config, key, None), int):
            return key
    raise ModelError(
        f"the configuration of {config.model_type!r} names no single width of its feed-forwards, so no fraction of "
        "them can be taken; give sizes with whole feed-forwards"
    )


def count_of(fraction: float, neurons: int) -> int:
    """The neurons that a fraction keeps; ModelError where that is no whole number."""
    count = round(fraction * neurons)
    if count < 1 or abs(count - fraction * neurons) > _ROUNDING * neurons:
        raise ModelError(
            f"{fraction!r} of a feed-forward of {neurons:,} neurons is {fraction * neurons:g}, which must be a whole "
            f"number from 1 on; give a fraction such as {_near(fraction, neurons)!r}"
        )
    return count


def check_fractions(backbone: PreTrainedModel, sizes: Iterable[Size]) -> None:
    """Raise ModelError for sizes whose fraction of the backbone's feed-forwards leaves no whole number of neurons."""
    if fractions := {size.feed_forward for size in sizes} - {1.0}:
        neurons = NestedFeedForwards.of(backbone).neurons
        for fraction in sorted(fractions):
            count_of(fraction, neurons)


def _near(fraction: float, neurons: int) -> float:
    """A fraction near the given one that leaves whole neurons."""
    return max(1, round(fraction * neurons)) / neurons


@torch.no_grad()
def narrow(backbone: PreTrainedModel, fraction: float) -> PreTrainedModel:
    """Keep the first `fraction` of every feed-forward's neurons, in place, and set their number in the config."""
    if fraction != 1:
        nested = NestedFeedForwards.of(backbone)
        count = count_of(fraction, nested.neurons)
        nested.keep([slice(count)] * len(nested.layers))
        setattr(backbone.config, _width_key(backbone.config), count)
    return backbone


def _found_in(layer: nn.Module, width: int, hidden: int, backbone: PreTrainedModel) -> FeedForward:
    """A layer's feed-forward, by the shapes of its matrices."""
    linear = {name: each for name, each in layer.named_modules() if isinstance(each, nn.Linear)}
    outs = [name for name, each in linear.items() if (each.in_features, each.out_features) == (width, hidden)]
    if len(outs) == 1:
        (path,) = outs
        while path:
            # Upwards from the matrix out, until the module holds matrices in.
            path = path.rpartition(".")[0]
            inside = f"{path}." if path else ""
            into = tuple(
                each
                for name, each in linear.items()
                if name.startswith(inside)
                and name != outs[0]
                and each.in_features == hidden
                and each.out_features in (width, 2 * width)
            )
            if into:
                counts = sorted(each.out_features // width for each in into)
                if counts in ([1], [1, 1], [2]) and not _has_more(layer, width):
                    return FeedForward(into, linear[outs[0]])
                break
    raise ModelError(
        f"{type(backbone).__name__} has feed-forwards of a form that this program cannot cut to a fraction (linear "
        f"layers from {hidden} to {width:,} elements and back, alone in their layer); give sizes with whole "
        "feed-forwards"
    )


def _has_more(layer: nn.Module, width: int) -> bool:
    """Whether something else than linear layers has a vector of an element a neuron, such as a norm of the neurons."""
    return any(
        parameter.shape == (width,)
        for each in layer.modules()
        if not isinstance(each, nn.Linear)
        for parameter in each.parameters(recurse=False)
    )
