"""Each setting once: its name, default, unit, range and help text."""
