"""Shared test set-up.

Triton's interpreter must be chosen before anything imports ``triton.language``, and it cannot live in one
process with compiled kernels: machines with a CUDA device run the compiled kernels, all others the
interpreter.
"""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

torch.set_num_threads(1)
