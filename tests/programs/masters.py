"""Two ranks with parameters of 16 bits: what one of them changes, halved, is less than a digit, and adds up."""

import torch
from torch import nn

import fedmpi

DIGIT = 2**-7  # the last one of bfloat16 at 1


def main():
    model = nn.Linear(4, 1, bias=False)
    nn.init.ones_(model.weight)
    model = model.to(torch.bfloat16)
    fed = fedmpi.average(model, every=2)
    x = fed.federation.server.x
    assert model.weight.data_ptr() != x.data_ptr()

    def change(by):
        with torch.no_grad():
            if fed.rank == 0:
                model.weight[0, :2].add_(by)
        fed.step()
        fed.step()

    change(DIGIT)
    assert x[:4].tolist() == [1 + DIGIT / 2] * 2 + [1, 1]
    assert model.weight[0].tolist() == [1] * 4  # rounded, to even
    change(0)
    assert x[:4].tolist() == [1 + DIGIT / 2] * 2 + [1, 1]  # nobody has changed anything
    change(DIGIT)
    assert x[:4].tolist() == [1 + 3 * DIGIT / 4] * 2 + [1, 1]
    fed.finish()
    assert model.weight[0].tolist() == [1 + DIGIT] * 2 + [1, 1]
    assert fed.accounts()["bytes"] == 3 * 4 * len(x)
    print("well")


if __name__ == "__main__":
    main()
