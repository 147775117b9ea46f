"""Interfaces of other engines, served by Octavo: thin layers above the engine, which knows none of them."""
