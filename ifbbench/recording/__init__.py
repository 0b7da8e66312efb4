"""Recording: a run directory that is valid line by line while the run goes on."""
