"""The parts of `allocate`: its input and output (`claims`), the board on which devices change hands, the reasons."""
