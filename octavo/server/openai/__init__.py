"""OpenAI's routes. Read ``completions`` first, for a chat request; ``protocol`` has the request and response bodies."""
