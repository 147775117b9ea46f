"""Which sequences a step computes. Integers only: a step is testable without a model."""
