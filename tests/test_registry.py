"""Classes are found by their names however they are spelled, and no two share a spelling."""

import pytest

from fedmpi.config.build import CHOICES
from fedmpi.errors import UserError
from fedmpi.registry import find, known, plain


@pytest.mark.parametrize("group", CHOICES)
def test_every_spelling_finds_the_class_and_no_two_classes_share_one(group):
    package, base, _ = CHOICES[group]
    classes = known(package, base)
    shared = [name for name in classes if sum(plain(name) == plain(other) for other in classes) > 1]
    assert shared == (["fedavg_m", "fedavgm"] if group == "algorithm" else [])  # as two papers spell them
    for name, cls in classes.items():
        for spelling in (name, name.upper(), name.replace("_", "-"), name.replace("_", ""), cls.__name__):
            if plain(spelling) == plain(name) and spelling.lower() not in set(classes) - {name}:
                # a class may have another name on the command line, and FedAvgM is not fedavg_m
                assert find(group, spelling, package, base) is cls


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("mime_adam", "mimeadam"), ("MimeAdam", "mimeadam"), ("fed-avg", "fedavg"), ("FedAvg-M", "fedavg_m"),
        ("NaiveAdaptiveFedAvg", "naive_adaptive_fedavg"), ("FedAMS", "fedams"), ("LocalAMSGrad", "local_amsgrad"),
        ("FedAvgM", "fedavgm"),
    ],
)  # fmt: skip
def test_spellings_of_papers(spelling, name):
    package, base, _ = CHOICES["algorithm"]
    assert find("algorithm", spelling, package, base) is known(package, base)[name]


@pytest.mark.parametrize(
    ("spelling", "hint"),
    [
        ("fed_ams", "its name in fedmpi is 'local_amsgrad'"),  # of another paper than FedAMS
        ("LocalSGD", "its name in fedmpi is 'fedavg'"),
        ("scafold", "did you mean 'scaffold'?"),
    ],
)
def test_other_names_are_answered_with_ours(spelling, hint):
    package, base, _ = CHOICES["algorithm"]
    with pytest.raises(UserError, match="unknown algorithm") as error:
        find("algorithm", spelling, package, base)
    assert hint in str(error.value)
