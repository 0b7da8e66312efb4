"""Questions about many runs or none: what fits, what an iteration costs, sweeps and calibration."""
