"""Options of engine and server and where they are read from. Read ``engine_config.py`` first."""
