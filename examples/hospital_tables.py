"""Tables of four hospitals with invented patients, to try fedmpi with: hospital_0.csv to hospital_3.csv.

python hospital_tables.py

A row is a patient: age, blood pressure, thirty laboratory values, and whether the patient fell ill. One rule lies
behind all tables; the hospitals' patients are unlike (younger or older), and no hospital has enough to find the rule.
"""

import numpy as np
import pandas as pd


def main():
    weights = np.random.default_rng(0).normal(0, 1, 32)
    for hospital in range(4):
        draw = np.random.default_rng([1, hospital])
        values = draw.standard_normal((200, 32))
        values[:, 0] += (hospital - 1.5) / 2
        risk = values @ weights + draw.normal(0, 1, 200)
        table = {"age": (55 + 12 * values[:, 0]).round(), "pressure": (130 + 15 * values[:, 1]).round()}
        table |= {f"lab_{column - 1}": (5 + values[:, column]).round(2) for column in range(2, 32)}
        table["ill"] = np.where(risk > 0, "yes", "no")
        pd.DataFrame(table).to_csv(f"hospital_{hospital}.csv", index=False)
    print("hospital_0.csv to hospital_3.csv: 200 patients each")


if __name__ == "__main__":
    main()
