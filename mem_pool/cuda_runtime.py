"""Copies of the CUDA runtime that torch has no call for, from the library that torch has loaded."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import numpy as np

MAX_PITCH = 2**31 - 1
"""cudaDeviceProp.memPitch, the largest stride of `copy_2d`, the same on every GPU so far."""

_TO_HOST, _TO_DEVICE = 2, 1  # cudaMemcpyKind
_IN_STREAM_ORDER = 1  # cudaMemcpySrcAccessOrderStream


class _Attributes(ctypes.Structure):
    """cudaMemcpyAttributes; the locations are hints for managed memory only."""

    _fields_ = (
        ("order", ctypes.c_int),
        ("source_location", ctypes.c_int * 2),
        ("target_location", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


class CudaRuntime:
    """Asynchronous copies between pinned host memory and a GPU. Addresses, strides and sizes are in bytes.

    Each raises ``RuntimeError`` with CUDA's words when the call is refused.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        library.cudaGetErrorString.restype = ctypes.c_char_p
        version = ctypes.c_int()
        self._check("cudaRuntimeGetVersion", library.cudaRuntimeGetVersion(ctypes.byref(version)))
        self.version = version.value

    @property
    def has_batch(self) -> bool:
        """Whether `copy_batch` is there: CUDA 12.8."""
        return self.version >= 12080 and hasattr(self.library, "cudaMemcpyBatchAsync")

    def copy_2d(
        self,
        target: int,
        target_stride: int,
        source: int,
        source_stride: int,
        width: int,
        height: int,
        to_host: bool,
        stream: int,
    ) -> None:
        """Copy `height` pieces of `width` bytes; strides are at most `MAX_PITCH`."""
        sizes = (ctypes.c_size_t(value) for value in (target_stride, source_stride, width, height))
        to, of, wide, high = sizes
        code = self.library.cudaMemcpy2DAsync(
            ctypes.c_void_p(target),
            to,
            ctypes.c_void_p(source),
            of,
            wide,
            high,
            _TO_HOST if to_host else _TO_DEVICE,
            ctypes.c_void_p(stream),
        )
        self._check("cudaMemcpy2DAsync", code)

    def copy_batch(self, targets: np.ndarray, sources: np.ndarray, sizes: np.ndarray, stream: int) -> None:
        """Copy `sizes[i]` bytes from `sources[i]` to `targets[i]`, in any order; all int64 [n], n > 0.

        `stream` is not the default stream.
        """
        attributes = _Attributes(order=_IN_STREAM_ORDER)
        first = ctypes.c_size_t(0)
        arrays = [np.ascontiguousarray(array, dtype=np.int64) for array in (targets, sources, sizes)]
        arguments = [
            *(ctypes.c_void_p(array.ctypes.data) for array in arrays),
            ctypes.c_size_t(len(sizes)),
            ctypes.byref(attributes),
            ctypes.byref(first),
            ctypes.c_size_t(1),
        ]
        failed = ctypes.c_size_t(0)
        if self.version < 13000:  # CUDA 13 took this argument away
            arguments.append(ctypes.byref(failed))
        code = self.library.cudaMemcpyBatchAsync(*arguments, ctypes.c_void_p(stream))
        self._check("cudaMemcpyBatchAsync", code)

    def clear_error(self) -> None:
        """Forget the last error, which the next check of torch would take for its own."""
        self.library.cudaGetLastError()

    def _check(self, call: str, code: int) -> None:
        if code:
            self.clear_error()
            text = self.library.cudaGetErrorString(code).decode()
            raise RuntimeError(f"{call} returned {code}: {text}")


@cache
def load() -> CudaRuntime | None:
    """The runtime in this process; None without one, as with torch for the CPU."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    paths = [line.split(maxsplit=5)[5] for line in lines if "libcudart" in line]
    return CudaRuntime(ctypes.CDLL(paths[0])) if paths else None


def clear_error() -> None:
    """Forget the last error of the runtime, if there is one."""
    runtime = load()
    if runtime is not None:
        runtime.clear_error()
