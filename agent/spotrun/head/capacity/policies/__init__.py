"""The policies: each is a function from a `Situation` and a `Demand` to a `Placement`."""
