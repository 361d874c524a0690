"""A host-backed KV memory pool with a radix prefix cache for sparse-attention models."""
