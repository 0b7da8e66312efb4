"""Workloads: which requests arrive, when, and how long they are. The entry point is `load.load_trace`."""
