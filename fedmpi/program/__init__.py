"""How programs begin and end: of several ranks (`ranks`), of one process (`single`); their options (`parser`)."""

import os

# Threads of OpenMP spin while they wait for work. GNU's do so for milliseconds, which takes the cores from other ranks
# and programs: on 2 busy cores a rank with 2 threads needed 5.6 s where 1.3 to 3.6 s were enough with this. It is read
# when torch is loaded.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
