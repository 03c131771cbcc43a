"""Many runs of one training job, and the best of their settings (``python -m fedmpi sweep``)."""
