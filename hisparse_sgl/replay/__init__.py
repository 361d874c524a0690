"""Replay of request traces through the pool's own coordinator, with a clock model. Needs no GPU."""
