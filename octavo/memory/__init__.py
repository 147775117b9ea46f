"""KV cache memory: block pools, reference counts, block tables, prefix cache, watermark. Integers only."""
