"""The head: who trains with whom (planner), how many machines (capacity), what it cost (ledger)."""
