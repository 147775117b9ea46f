"""Plain data that every room may import: configuration, requests, plans, results, outputs, errors."""
