"""Integrations of the pool with serving engines and model libraries."""
