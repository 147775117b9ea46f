"""Workloads: which requests arrive when, of which lengths, by which users; seeded and generated lazily. No torch."""
