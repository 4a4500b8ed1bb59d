"""What the operator does. `fabfile.py` has a task for each command; what the tasks do is here, as plain functions."""
