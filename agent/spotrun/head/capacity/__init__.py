"""How many machines should each pool have, and which pools may each job use?

`place` asks the policies from which pools each job gets machines. `sizes.decide` turns the answers into sizes of pools.
"""
