"""The wing that measures: benchmarks, the policy lab, the simulator, workloads and drawings.

It knows the engine; the engine does not know it.
"""
