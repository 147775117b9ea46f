"""The commands ``octavo bench`` and ``octavo simulate``."""
