"""HTTP: the OpenAI routes, streaming, authentication, limits, metrics, logs."""
