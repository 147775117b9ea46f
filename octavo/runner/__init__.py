"""One worker's device: weights, KV cache, rows of running sequences, steps. Read ``model_runner.py`` first."""
