"""Answers about many runs, or before any: what fits, what an iteration costs, sweeps and calibration."""
