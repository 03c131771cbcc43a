"""Classes are found by their names however they are spelled, and no two share a spelling."""

import importlib.metadata

import pytest

from fedmpi.config.build import CHOICES
from fedmpi.ground import registry
from fedmpi.ground.errors import UserError
from fedmpi.ground.registry import find, known, plain
from fedmpi.training.config import read_command_line


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


@pytest.fixture
def plug_ins(tmp_path, monkeypatch):
    """Installed packages: one with a good algorithm, others that end the process when they are imported."""
    modules = {
        "goodplug": "from fedmpi.algorithms import FedAvg\nclass Mine(FedAvg):\n    'Ours.'\n",
        "exitplug": "import sys\nsys.exit(3)\n",
        "oddplug": "class Odd(KeyboardInterrupt): pass\nraise Odd('x')\n",
    }
    for name, text in modules.items():
        (tmp_path / f"{name}.py").write_text(text)
    entries = [importlib.metadata.EntryPoint(name, f"{name}:Mine", "fedmpi.algorithms") for name in modules]
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "_all_entry_points", lambda: importlib.metadata.EntryPoints(entries))
    monkeypatch.setattr(registry, "BROKEN", {}, raising=False)
    monkeypatch.setattr("fedmpi.config.build.BROKEN", registry.BROKEN, raising=False)
    registry._plug_ins.cache_clear()
    yield
    registry._plug_ins.cache_clear()


def test_a_plug_in_that_ends_the_process_is_named_and_left_out(plug_ins):
    lines = (
        "the plug-in exitplug is left out: fedmpi.algorithms 'exitplug.Mine': cannot be imported: ImportError: "
        "SystemExit(3) was raised",
        "the plug-in oddplug is left out: fedmpi.algorithms 'oddplug.Mine': cannot be imported: ImportError: "
        "Odd(x) was raised",
    )
    listed = read_command_line(["--list", "algorithms"])
    assert "\ngoodplug  Ours." in listed and tuple(listed.splitlines()[-2:]) == lines
    assert read_command_line([]).notes == lines
    with pytest.raises(UserError, match=r"^algorithm 'exitplug.Mine': cannot be imported: .*SystemExit\(3\)"):
        read_command_line(["--algorithm", "exitplug"])


@pytest.mark.parametrize(
    ("paths", "name", "both"),
    [
        ({"FedAvg": ["goodplug:Mine"]}, "fedavg", "fedmpi.algorithms.fedavg.FedAvg and goodplug.Mine"),
        ({"fafed": ["goodplug:Mine"]}, None, "fedmpi.algorithms.fafed.FAFED and goodplug.Mine"),  # the default
        ({"mine": ["goodplug:Mine", "otherplug:Mine"]}, "mine", "goodplug.Mine and otherplug.Mine"),
        ({"mine": ["goodplug:Mine", "goodplug:Mine"]}, "mine", ""),  # one package that is found twice
    ],
)
def test_a_name_of_two_classes_is_refused(plug_ins, tmp_path, monkeypatch, paths, name, both):
    """fedmpi's own class was taken, or the last plug-in, without a word."""
    (tmp_path / "otherplug.py").write_text((tmp_path / "goodplug.py").read_text())
    entries = [importlib.metadata.EntryPoint(own, path, "fedmpi.algorithms") for own in paths for path in paths[own]]
    monkeypatch.setattr(registry, "_all_entry_points", lambda: importlib.metadata.EntryPoints(entries))
    words = ["--algorithm", name] if name else []
    if not both:
        read_command_line(words)
        return
    with pytest.raises(UserError, match=f"is the name of {both}, a plug-in: expected the dotted path of one of them"):
        read_command_line(words)
    assert read_command_line(["--algorithm", "goodplug.Mine"]).algorithm.step_size > 0


@pytest.mark.parametrize("group", CHOICES)
def test_a_base_class_is_no_choice(group):
    base = CHOICES[group].base
    name = f"{base.__module__}.{base.__qualname__}"
    end = ", or a function that makes one" if group == "model" else ""
    with pytest.raises(UserError, match=f"^{group} '{name}': expected a subclass of {name}{end}$"):
        read_command_line([f"--{group}", f"{base.__module__}.{base.__qualname__}"])
