"""From the name of a model to its files, and from checkpoint files to weights."""
