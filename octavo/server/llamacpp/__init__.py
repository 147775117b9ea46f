"""The native routes of llama.cpp's server, as far as their meaning exists here."""
