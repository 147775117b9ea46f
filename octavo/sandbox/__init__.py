"""Processes with limits of time and memory, for what clients send: schemas, grammars, templates, images, recordings."""
