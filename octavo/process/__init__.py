"""Processes that an engine starts: children, Ctrl-C, start-up times, and the sandbox. Read ``children.py`` first."""
