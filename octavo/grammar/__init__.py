"""Grammars of structured output: from a request's schema or regex to token masks. Read ``compiler.py`` first."""
