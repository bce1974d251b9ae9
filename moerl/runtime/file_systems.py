"""The kind of the file system that holds a folder."""

from __future__ import annotations

from pathlib import Path

import psutil

NETWORK_FILE_SYSTEMS = frozenset(
    ("nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "9p", "afs")
) | {"fuse.sshfs", "fuse.glusterfs", "fuse.ceph"}


def file_system(folder: Path) -> str:
    """Type of the file system of a folder, which need not exist yet: ext4, nfs4, ..."""
    mounts = {Path(part.mountpoint): part.fstype for part in psutil.disk_partitions(all=True)}
    folder = folder.resolve()
    return next((mounts[path] for path in (folder, *folder.parents) if path in mounts), "")
