"""Processes with limits of time and memory, for schemas, grammars and chat templates that clients send."""
