"""The networks, one module for a family, and the readers of config.json; start with ``llama`` and ``network``."""
