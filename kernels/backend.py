"""Which implementation runs an operation, and the one guarded import of Triton.

``TRITON_INTERPRET=1`` counts only when it is set before ``triton.language`` is first imported. Interpreted
and compiled kernels cannot live in one process.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch

Backend = Literal["triton", "interpreter", "reference"]

if TYPE_CHECKING:
    import triton
    import triton.language as tl

    HAS_TRITON = True
else:
    try:
        import triton
        import triton.language as tl

        HAS_TRITON = True
    except ImportError:
        triton = tl = None
        HAS_TRITON = False

INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")
_interpreter_lock = threading.Lock()


def jit(function: Callable[..., Any], do_not_specialize: tuple[str, ...] = ()) -> Any:
    """``triton.jit``; the plain function where Triton is not installed. Nothing is assumed of the values of
    the arguments in ``do_not_specialize``."""
    options: Any = {"do_not_specialize": list(do_not_specialize)}
    return triton.jit(function, **options) if HAS_TRITON else function


def choose(tensor: torch.Tensor, backend: str | None = None) -> Backend:
    """The implementation to run for ``tensor``.

    CUDA tensors take compiled Triton. CPU tensors take Triton's interpreter when it is on, else the torch
    reference. ``backend`` overrides this.

    Raises:
        ValueError: the wanted implementation cannot run here.
    """
    if backend is None:
        backend = "triton" if tensor.is_cuda else "interpreter" if INTERPRETED else "reference"
    if backend == "reference":
        return "reference"
    if backend not in ("triton", "interpreter"):
        raise ValueError(f"backend={backend!r} must be 'triton', 'interpreter', 'reference' or None")
    if not HAS_TRITON:
        raise ValueError(f"backend={backend!r} needs Triton; install triton or use backend='reference'")
    if backend == "interpreter":
        if not INTERPRETED or tensor.is_cuda:
            raise ValueError(
                f"backend='interpreter' with a {tensor.device} tensor needs a CPU tensor and "
                "TRITON_INTERPRET=1 set before triton.language is imported; use backend='reference'"
            )
        return "interpreter"
    if INTERPRETED or not tensor.is_cuda:
        raise ValueError(
            f"backend='triton' with a {tensor.device} tensor needs a CUDA tensor and TRITON_INTERPRET unset "
            "when triton.language is imported; unset it or use backend='reference'"
        )
    return "triton"


def launch(kernel: Any, grid: tuple[int, ...], device: torch.device, *args: Any, **meta: Any) -> None:
    """Run a Triton kernel on the current stream of ``device``. Interpreted launches take turns: they are not
    thread-safe."""
    if INTERPRETED:
        with _interpreter_lock:
            kernel[grid](*args, **meta)
        return
    if device.index == torch.cuda.current_device():
        kernel[grid](*args, **meta)  # the context below costs as much as a third of the launch
        return
    with torch.cuda.device(device):
        kernel[grid](*args, **meta)


def power_of_two(value: int) -> int:
    """The smallest power of two not below ``value`` (at least 1)."""
    return 1 << max(0, value - 1).bit_length()


@functools.cache
def can_overlap(device: torch.device) -> bool:
    """Whether a kernel on ``device`` may be launched while the one before it runs, and wait for that one's
    end itself, which hides the time of a launch (programmatic dependent launch)."""
    if device.type != "cuda" or not HAS_TRITON or INTERPRETED or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device)[0] >= 9 and hasattr(
        getattr(tl.extra, "cuda", None), "gdc_wait"
    )


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def idle_share(device: torch.device, batch: int) -> int:
    """Programs that each of ``batch`` requests may have when each program takes a multiprocessor."""
    return _processors(device) // batch if device.type == "cuda" else 2


def copy_programs(device: torch.device, items: int, a_processor: int = 2) -> int:
    """Programs of a looping copy kernel: enough to cover PCIe latency, never more than there are items."""
    return max(1, min(items, a_processor * _processors(device) if device.type == "cuda" else 2))


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    dtypes: torch.dtype | tuple[torch.dtype, ...],
    shape: tuple[int | None, ...],
    device: torch.device | None = None,
) -> None:
    """Raise ValueError unless ``tensor`` has one of ``dtypes``, ``shape`` (None: any size) and ``device``."""
    if tensor.dtype is not dtypes and not (isinstance(dtypes, tuple) and tensor.dtype in dtypes):
        wanted = " or ".join(str(dtype) for dtype in (dtypes if isinstance(dtypes, tuple) else (dtypes,)))
        raise ValueError(f"{name}.dtype={tensor.dtype} must be {wanted}; convert it")
    sizes = tensor.shape
    fits = len(sizes) == len(shape)
    for size, want in zip(sizes, shape, strict=False):
        fits = fits and (want is None or want == size)
    if not fits:
        raise ValueError(f"{name}.shape={tuple(sizes)} must be {shape} (None: any size); reshape it")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name}.device={tensor.device} must be {device}; move it")
