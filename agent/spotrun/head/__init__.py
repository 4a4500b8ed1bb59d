"""The head: who trains with whom (planner), whose is each device (allocate), how many machines (capacity), and what
they cost (books)."""
