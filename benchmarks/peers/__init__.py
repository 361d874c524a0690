"""Kernels of other projects, measured on the same inputs. None of their code is in this repository."""
