"""Settings: what can be set, how it is written, and a run as resolved."""
