"""The papers' tables and figures, run and compared with what the papers print (``python -m reproduction``)."""
