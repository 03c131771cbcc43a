"""What everything stands on: nothing of fedmpi's is imported here."""
