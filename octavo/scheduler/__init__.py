"""Who runs this step. Integers only: a step is testable without a model."""
