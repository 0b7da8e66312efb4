"""Replay: hands the requests of a trace to the engine as they arrive, and records the run."""
