"""Which sequences each step computes, in integers only: a step is testable without a model.

Read ``scheduler.py`` first, from ``Scheduler.schedule`` down; then ``running.py`` and ``admission.py``.
"""
