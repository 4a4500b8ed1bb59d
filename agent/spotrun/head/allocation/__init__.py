"""The parts of `allocate`: what is asked and answered, the board on which devices change hands, the reasons."""
