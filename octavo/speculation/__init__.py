"""Speculative decoding: drafters (``drafter.Drafter``), and how many of their tokens a step verifies.

Read ``speculator.py`` first.
"""
