"""Resolving a model's name to its files, and reading checkpoints into networks."""
