"""HTTP under the routes: connections, middleware, bodies, streams of events, errors. Read ``middleware.py`` first."""
