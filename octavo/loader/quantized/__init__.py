"""Readers of quantised Hugging Face checkpoints: GPTQ, AWQ, compressed-tensors and fp8."""
