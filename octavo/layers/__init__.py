"""Layers that every network is built of; each knows its share in a tensor-parallel group. Read ``layer.py`` first."""
