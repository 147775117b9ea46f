"""The engine: turns prompts into requests, runs their steps, and turns the tokens into outputs.

Read ``llm_engine.py`` (one process) or ``async_llm.py`` (cores in processes of their own) first, then ``core.py``.
"""
