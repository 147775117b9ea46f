"""``/v1/messages``: Anthropic's Messages API, as a chat whose blocks are converted to messages and back."""
