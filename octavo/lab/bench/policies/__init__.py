"""The policy lab: scenarios by scheduling policies, in process, against a server and simulated."""
