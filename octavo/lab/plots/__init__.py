"""Drawings of figures, and reports: one HTML file each."""
