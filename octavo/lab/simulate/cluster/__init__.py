"""Several simulated engines behind a router, with one virtual time for all."""
