"""Return freed memory of the C library to the system."""

import ctypes


def return_free_memory() -> None:
    """Call `malloc_trim` if the C library is glibc; do nothing otherwise.

    Its `malloc` (2.36) leaves a gap of the size of a matrix after each layer of a model.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
