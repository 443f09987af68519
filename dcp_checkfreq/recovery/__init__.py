"""Which checkpoint to go on from, and what dead attempts left behind."""
