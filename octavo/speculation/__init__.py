"""Drafters: guesses at the tokens that follow, and how many of them a step verifies."""
