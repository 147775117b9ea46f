"""The routes of OpenAI's API: completions, chat completions and responses. ``protocol.py`` has their bodies."""
