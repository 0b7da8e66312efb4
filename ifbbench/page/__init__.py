"""The run page: one HTML file with the interactive timeline of a run, or of two."""
