"""Stores of KV cache blocks outside the engine: on local disk, and shared by machines."""
