"""Recording what the scheduler of a real engine decides, from inside that engine."""
