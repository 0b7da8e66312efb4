"""The settings, one group a file, with their choices and what their values are converted with."""
