"""Towers: the parts of networks that make features of images, which stand in prompts like embeddings of tokens."""
