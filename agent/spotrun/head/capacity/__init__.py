"""Which machines should there be, and which of them may each job use?

`place` (the policies) says from which pools each job gets machines. `sizes.decide` turns that into sizes of pools.
"""
