"""GPU benchmarks of the package; run each as ``python -m benchmarks.NAME`` from the top of a checkout."""
