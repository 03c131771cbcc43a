"""Data sets: their files, how they are split over clients, and the order in which samples are drawn."""
