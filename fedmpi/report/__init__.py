"""What runs look like: figures, tables, one page (``python -m fedmpi.report RUN...``)."""
