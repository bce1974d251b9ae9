"""Sealed, immutable, checksummed bytes by URI; see `moerl.records.blob_store`."""

from moerl.records.blob_store import BlobStore

__all__ = ["BlobStore"]
