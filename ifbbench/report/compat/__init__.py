"""The files of other tools, written from a run directory."""
