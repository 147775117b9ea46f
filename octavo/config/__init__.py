"""Options of engine and server, and their sources. Read ``engine_config.py`` first."""
