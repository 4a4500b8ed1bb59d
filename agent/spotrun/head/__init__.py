"""The head: who trains with whom (planner), whose is each device (allocation), how many machines (capacity), and what
they cost (costs)."""
