"""glibc's allocator, told to keep what it has: no page is given back, so none is made anew. The peak is the price."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


def keep_heap() -> None:
    """Tells glibc to serve every allocation from its heap and never to shrink it."""
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, 2**31 - 1)
    libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
