"""Plain data that every room may import: requests, plans, results, outputs, errors. Read ``request.py`` first."""
