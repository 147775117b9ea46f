"""``/v1/responses``: OpenAI's Responses API, as a chat whose items are converted to messages and back."""
