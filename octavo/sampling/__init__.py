"""Samples tokens: logits processors, masks and the sampler. Read ``sampler.py`` first."""
