"""Ollama's API: bodies (``protocol``), the models that it names (``directory``), its routes, its own listener."""
