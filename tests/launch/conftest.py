"""The trainer's small real shards, for tests that launch it."""

from tests.trainer.conftest import document_shards, tuple_shards

__all__ = ["document_shards", "tuple_shards"]
