"""The routes for recordings."""
