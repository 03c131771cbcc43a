"""Two methods with two seeds each, and a figure as wide as a column of a paper: figure.pdf.

python paper_figure.py
"""

import fedmpi

for name in ("fafed", "fedavg"):
    for seed in (0, 1):
        fedmpi.train(algorithm=name, clients=4, rounds=10, seed=seed, out="figure_runs", eval_every=1)
labels = {"fafed": "FAFED", "fedavg": "FedAvg"}
style = {"width": 245, "height": 170, "size": 8, "scale": "error", "labels": labels}
fedmpi.figure("figure_runs", "accuracy", path="figure.pdf", **style)
print("figure.pdf")
