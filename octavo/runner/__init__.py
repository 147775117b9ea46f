"""One worker: weights, KV tensors, the batch of rows, forward, sampling."""
