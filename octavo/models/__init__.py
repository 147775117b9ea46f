"""The networks, and what config.json says about them."""
