"""Processes with limits of time and memory, for schemas, grammars, chat templates and images that clients send."""
