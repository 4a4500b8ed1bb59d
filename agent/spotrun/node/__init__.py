"""What runs on a node: the agent, the launcher of the workers, the connection to the head, the health checks."""
