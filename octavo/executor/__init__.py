"""Runs steps on workers: in this process, in others, or on other machines. Read ``executor.py`` first."""
