"""Sampling: logits processors, the sampler and its outputs."""
