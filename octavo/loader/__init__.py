"""From a model's name to its files (``resolve``), and from checkpoints to weights (``weights``, to be read first)."""
