"""How programs begin and end: of several ranks (`ranks`), of one process (`single`); their options (`parser`)."""
