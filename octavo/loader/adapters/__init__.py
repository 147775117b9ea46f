"""Adapters on disk: folders of PEFT and GGUF files, checked against a network and read."""
