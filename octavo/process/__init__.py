"""Processes that an engine starts: their start and end, Ctrl-C, the sandbox. Read ``start_process.py`` first."""
