"""Random numbers as pure functions of keys: the same for every rank, worker and batch, and after every resume.

Three kinds. SplitMix64 (Steele, Lea, Flood 2014, https://doi.org/10.1145/2714064.2660195) as a counter-based hash, for
millions of draws at once, where a generator object for each text would cost more than the draws' use: output i of the
stream that starts at `key` is finalise(key + (i + 1)·gamma). Philox generators under a key and a counter, for orders
and sizes. A single seed made of keys, for generators that take no more than that. models/visibility.py computes the
same SplitMix64 on a device.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from data.ground.errors import DataError

_WORD = 2**64 - 1
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)
_HALF = np.uint64(32)
_LOW_HALF = np.uint64(0xFFFFFFFF)


class Purpose(IntEnum):
    """The purpose of a draw; draws of different purposes are independent. Changing a number changes a run's draws."""

    WINDOW = 1
    ENCODER_WORDS = 2
    DECODER_WORDS = 3
    ENCODER_TOKENS = 4
    DECODER_TOKENS = 5
    POSITIVE = 6
    NEGATIVES = 7
    VISIBILITY = 8
    TEXTS = 9


def mix64(values: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser: a bijection of 64 bits in which every input bit reaches every output bit."""
    shifted = values >> np.uint64(30)
    mixed = values ^ shifted
    mixed *= _MULTIPLIER_1
    np.right_shift(mixed, np.uint64(27), out=shifted)
    mixed ^= shifted
    mixed *= _MULTIPLIER_2
    np.right_shift(mixed, np.uint64(31), out=shifted)
    mixed ^= shifted
    return mixed


def sample_keys(seed: int, *, epochs: np.ndarray, sources: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """A 64-bit key for each sample: uint64 [n]. All three arrays hold whole numbers from 0, [n]."""
    keys = np.full(len(samples), seed & 0xFFFFFFFFFFFFFFFF, dtype=np.uint64)
    for part in (epochs, sources, samples):
        # Without mixing the part first, neighbouring numbers and neighbouring keys could cancel out.
        keys = mix64((keys + _GAMMA) ^ mix64(np.asarray(part).astype(np.uint64) + _GAMMA))
    return keys


def purpose_keys(keys: np.ndarray, purpose: Purpose) -> np.ndarray:
    """The keys of the draws for one purpose: uint64 [n] -> uint64 [n]."""
    return mix64(keys ^ mix64(np.asarray([int(purpose)], dtype=np.uint64) * _GAMMA))


def draws(keys: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Draw number indices[i] of the stream with key keys[i]: 64 uniform bits each; shapes broadcast."""
    return mix64(keys + (indices.astype(np.uint64) + np.uint64(1)) * _GAMMA)


def integers(bits: np.ndarray, below: np.ndarray | int) -> np.ndarray:
    """Uniform whole numbers in [0, below) from the lower 32 bits of draws; off by at most below / 2^32."""
    return (((bits & _LOW_HALF) * np.asarray(below, dtype=np.uint64)) >> _HALF).astype(np.int64)


def derive_seed(*keys: int) -> int:
    """A 63-bit seed from whole numbers; different keys give unrelated seeds."""
    return int(np.random.SeedSequence([key & _WORD for key in keys]).generate_state(1, np.uint64)[0] >> 1)


def check_seed(seed: int) -> int:
    """Return a seed that fits into 64 bits; refuse any other."""
    if not 0 <= seed <= _WORD:
        raise DataError(f"seed {seed} is not between 0 and 2^64 - 1; choose another")
    return seed


def philox(domain: int, seed: int, *, source: int, epoch: int, item: int) -> np.random.Philox:
    # Draws advance the counter's lowest word, so streams that differ in a higher word or in the key do not overlap.
    counter = np.array([0, item, epoch, source], dtype=np.uint64)
    return np.random.Philox(key=np.array([check_seed(seed), domain], dtype=np.uint64), counter=counter)


def step_generator(seed: int, step: int) -> np.random.Generator:
    """The generator of one training step, the same on all ranks."""
    return np.random.Generator(np.random.Philox(key=np.array([seed, step], dtype=np.uint64)))
