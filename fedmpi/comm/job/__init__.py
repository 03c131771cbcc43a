"""Opening and closing a federation on machines: every door (join, average, fedmpi.train, programs) goes through it."""
