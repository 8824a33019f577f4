"""Ladders: what is accepted, what is refused, and names."""

from __future__ import annotations

import pytest

from models.sizes import STARBUCKS_LADDER, Body, Ladder, ModelError, Size


def test_grid_is_every_pair_once():
    ladder = Ladder.of([(2, 32), (4, 64), (6, 96)])
    # What study files' results are named by: this very text.
    assert ",".join(map(str, ladder.grid)) == "2x32,2x64,2x96,4x32,4x64,4x96,6x32,6x64,6x96"
    # A ladder that repeats its one layer count has each size once.
    static = Ladder.of([(1, 32), (1, 64), (1, 96)])
    assert static.grid == static.sizes


def test_a_fraction_of_the_feed_forwards_is_a_third_part():
    ladder = Ladder.of([[4, 32, 0.25], [6, 64, 0.25], [6, 96, 0.5], [6, 128, 1.0]])
    assert [str(size) for size in ladder] == ["4x32x0.25", "6x64x0.25", "6x96x0.5", "6x128"]
    assert [size.numbers for size in ladder] == [(4, 32, 0.25), (6, 64, 0.25), (6, 96, 0.5), (6, 128)]
    assert all(Size.parse(str(size)) == size == Size.of(size.numbers) for size in ladder)
    assert ladder.bodies == (Body(4, 0.25), Body(6, 0.25), Body(6, 0.5), Body(6))
    assert len(ladder.grid) == 16 and ladder.grid[1] == Size(4, 64, 0.25) and ladder.grid[-1] == ladder.full
    assert Size(6, 64, 0.25).fits_in(Size(6, 64)) and not Size(6, 64).fits_in(Size(6, 64, 0.25))
    for fraction in (1 / 3, 1e-05):
        assert Size.parse(str(Size(6, 64, fraction))) == Size(6, 64, fraction)


def test_cup_names():
    assert STARBUCKS_LADDER.name(Size(2, 32)) == "demi"
    assert STARBUCKS_LADDER.find("trenta") == Size(12, 768)
    assert STARBUCKS_LADDER.find("3x48") == Size(3, 48)
    assert Ladder.of([(1, 8), (2, 16)]).names == {Size(1, 8): "1x8", Size(2, 16): "2x16"}


@pytest.mark.parametrize(
    ("pairs", "word"),
    [
        ([], "empty"),
        ([(2, 32), (2, 64)], "increase"),
        ([(2, 32), (4, 32)], "increase"),
        ([(1, 32), (1, 64), (2, 128)], "increase"),
        ([(1, 64), (1, 32)], "increase"),
        ([(4, 64), (2, 32)], "increase"),
        ([(2, 32), (1, 64)], "increase"),
        ([(0, 32)], "below 1"),
        ([(1, 2, 0.5, 1)], "pair"),
        ([(1, 2, 3)], "fraction"),
        ([(1, 2, 0.0)], "fraction"),
        ([(1.5, 2)], "whole numbers"),
        ([(6, 32, 0.5), (6, 64, 0.25), (6, 96)], "none may shrink"),
        ([(6, 32, 0.5), (4, 64), (6, 96)], "none may shrink"),
        ([(6, 32, 0.5), (6, 64, 0.5), (6, 96)], "must grow"),
        ([(6, 32, 0.5), (6, 32)], "must grow"),
        ([(6, 32, 0.25), (6, 64, 0.5)], "end the ladder with \\[6, 64\\]"),
    ],
)
def test_refused_ladders(pairs, word):
    with pytest.raises(ModelError, match=word):
        Ladder.of(pairs)


@pytest.mark.parametrize(("layers", "hidden", "word"), [(6, 768, "outgrows"), (24, 1024, "stops short")])
def test_ladder_must_end_at_the_encoder(layers, hidden, word):
    STARBUCKS_LADDER.check_against(num_layers=12, hidden_size=768)
    with pytest.raises(ModelError, match=word):
        STARBUCKS_LADDER.check_against(num_layers=layers, hidden_size=hidden)


@pytest.mark.parametrize("text", ["", "2", "x32", "2x", "2x32x4", "-2x32", "demi"])
def test_refused_size_names(text):
    with pytest.raises(ModelError):
        Size.parse(text)
