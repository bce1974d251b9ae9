"""Records: sealed, immutable, checksummed bytes by URI (`blob_store`), routes, sampling masks."""

from moerl.records.blob_store import BlobStore

__all__ = ["BlobStore"]
