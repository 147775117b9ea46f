"""Processes that an engine starts: children, Ctrl-C, start reports, and the sandbox. Read ``children.py`` first."""
