"""What jobs and idle machines cost, and where the node time went. Pure, except the ledger, which is in the bucket."""
