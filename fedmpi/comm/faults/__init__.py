"""What happens when a rank is lost, stopped or stuck, or outlives its launcher, and how one ends the job."""
