"""What the record of a round holds."""

# What a record counts; everything else in it is a metric.
COUNTS = ("round", "iteration", "bytes", "gradients")
CLOCKS = ("seconds", "local_seconds", "communication_seconds", "evaluation_seconds")
