"""Files of requests in the OpenAI API's batch format, answered as the server would answer them (``runner.py``)."""
