"""Sealed, immutable, checksummed bytes by URI; see `moerl.blob.store`."""

from moerl.blob.store import BlobStore

__all__ = ["BlobStore"]
