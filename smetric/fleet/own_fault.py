"""Errors of connecting that say nothing of the instance: what was lacking was this process's own."""

from __future__ import annotations

import errno

_OURS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})


def is_own_fault(error: OSError) -> bool:
    """Whether a connection failed for want of a file descriptor, of memory or of a local port."""
    return error.errno in _OURS
