"""Workloads: which requests come, when, and how long they are. `load.load_trace` is the one way in."""
