"""The batch manager as a Python API: what a server or a script drives."""
