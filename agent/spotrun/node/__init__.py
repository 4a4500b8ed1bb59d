"""What runs on a node: the agent, its launcher of workers, and the way to the head and to the cloud's metadata."""
