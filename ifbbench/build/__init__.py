"""From settings to an engine: what each setting means for a model and a device."""
