"""Cohere's API: chats and vectors; ranking is with the other routes for scores."""
