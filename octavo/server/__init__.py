"""HTTP: the routes, streaming, authentication, limits, metrics, logs. Read ``app.py`` first, then ``state.py``."""
