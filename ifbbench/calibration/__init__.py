"""Calibration: measures the executor of a device, and fits the cost model's constants to it."""
