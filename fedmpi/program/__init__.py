"""How programs begin and end."""
