"""KV cache memory, in integers only: which block holds which tokens. Read ``block_manager.py`` first."""
