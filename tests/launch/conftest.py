"""The trainer's small real shards, for tests that launch it."""

from tests.trainer.conftest import crowded_shards, document_shards, tuple_shards

__all__ = ["crowded_shards", "document_shards", "tuple_shards"]
