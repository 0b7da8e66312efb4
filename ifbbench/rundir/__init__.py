"""Recording: a run directory that can be read line by line during the run."""
