"""Copy tensors to host memory for a checkpoint: queue every copy, then wait once for all of them.

A copy from a GPU into pageable memory goes through a buffer of the driver at 3 to 6 GB/s; into
page-locked memory, at the rate of the bus. Locking pages takes as long as a copy, so `Staging`
locks only memory that is copied into again: it counts the bytes of the first checkpoint, and from
the second one on keeps one page-locked buffer of that size.

Copies are queued on the current stream, behind the kernels that write their sources. A temporary
source may thus be freed before `wait`: the allocator reuses its memory in the order of the stream.
"""

import contextlib
import sys
import weakref

import torch

ALIGNMENT = 64
"""Bytes; each copy in the buffer starts at a multiple, as in memory of PyTorch's allocator."""


class Staging:
    """Host memory for the copies of one checkpoint at a time.

    The copies of a checkpoint must not be used after `begin` is called for the next one.
    """

    def __init__(self, device: torch.device, keep: bool = False) -> None:
        """Copy from `device`; with `keep`, into one buffer from the second checkpoint on."""
        self.device, self.keep = device, keep
        self.buffer: torch.Tensor | None = None
        """(bytes,) uint8; page-locked if the device is a GPU."""
        self._used = 0
        self._unlock: weakref.finalize | None = None

    def begin(self) -> None:
        """Start the copies of a checkpoint, once the device has computed what will be copied."""
        needed, self._used = self._used, 0
        if self.keep and needed > (0 if self.buffer is None else len(self.buffer)):
            self._reserve(needed)
        self.wait()  # memory that bitsandbytes pages is read by the CPU

    def copy(self, values: torch.Tensor) -> torch.Tensor:
        """A contiguous host tensor with the shape of `values`; it has their values after `wait`."""
        values = values.detach()
        start = -(-self._used // ALIGNMENT) * ALIGNMENT
        self._used = start + values.nbytes
        if self.buffer is None or self._used > len(self.buffer):
            found = torch.empty(values.shape, dtype=values.dtype)
        else:
            found = self.buffer[start : self._used].view(values.dtype).view(values.shape)
        return found.copy_(values, non_blocking=True)

    def wait(self) -> None:
        """Wait for all copies."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def release(self) -> None:
        """Give the buffer back."""
        if self._unlock is not None:
            self._unlock()
        self.buffer, self._unlock = None, None

    def _reserve(self, size: int) -> None:
        self.release()
        self.buffer = torch.empty(size, dtype=torch.uint8)
        if self.device.type == "cuda" and page_lock(self.buffer):
            # Pages must be unlocked before they are freed, so the finalizer holds the buffer.
            self._unlock = weakref.finalize(self, page_unlock, self.buffer)


def page_lock(buffer: torch.Tensor) -> bool:
    """Lock the pages of a host tensor for copies from a GPU; returns whether that worked.

    Not `pin_memory`: PyTorch's allocator rounds page-locked memory up to a power of two.
    """
    status = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0)
    if int(status) == 0:
        return True
    told = f"note: saving: copies use pageable memory: {buffer.nbytes:,} bytes cannot be locked"
    print(told, file=sys.stderr, flush=True)
    with contextlib.suppress(RuntimeError):  # CUDA reports the error again at the next kernel
        torch.zeros(1, device="cuda")
    return False


def page_unlock(buffer: torch.Tensor) -> None:
    """Undo `page_lock`."""
    torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())
