"""Settings from files and the command line."""

import pytest
import yaml

from fedmpi.config.build import CHOICES
from fedmpi.config.foreign_names import table
from fedmpi.config.layers import read_layers
from fedmpi.ground.errors import UserError
from fedmpi.ground.registry import known
from fedmpi.training.config import Config, read_command_line
from fedmpi.training.settings import RunSettings


def read(*words):
    settings = read_command_line([str(word) for word in words])
    assert isinstance(settings, Config)
    return settings


def test_defaults():
    config = read()
    assert type(config.algorithm).__name__ == "FAFED"
    assert config.task.data == "digits"
    assert type(config.partition).__name__ == "Even"
    assert config.model_class is None
    assert {
        "rounds": 100,
        "local_steps": 10,
        "batch_size": 50,
        "last_batch": "keep",
        "participation": 1,
        "weighting": "uniform",
        "weight_decay": 0,
        "result": "last",
        "holdout": 0,
        "seed": 0,
        "evaluate": "subset",
        "evaluate_samples": 1000,
        "checkpoint_minutes": 10,
        "checkpoint_keep": 2,
        "dtype": "float32",
        "device": "auto",
        "transport": "auto",
        "timeout": 1800,
        "on_loss": "end",
        "tf32": False,
        "deterministic": False,
        "cross_site": False,
        "out": "runs",
    }.items() <= config.flat().items()
    assert config.resolved["aggregation"]["name"] == "mean" and config.resolved["stages"]["name"] is None  # fmt: skip


# Of a run's settings: values just outside of their range, and at its end.
RANGES = [
    *((name, [0, -1], [1]) for name in (
        "rounds", "local_steps", "batch_size", "first_batch_size", "clients", "eval_every", "evaluate_samples",
        "patience", "checkpoint_every", "checkpoint_keep", "ranks", "check_replicas", "least",
    )),
    *((name, [0.0, -1.0], [1e-9]) for name in ("epochs", "local_epochs", "clip_norm", "timeout")),
    ("participation", [0.0, 1.0001], [1e-9, 1.0]), ("holdout", [-1e-9, 1.0], [0.0, 0.999]),
    ("weight_decay", [-1e-9], [0.0]), ("checkpoint_minutes", [-1e-9], [0.0]), ("threads", [0, 1025], [1, 1024]),
    ("last_batch", ["lose"], ["keep", "merge", "drop"]), ("weighting", ["equal"], ["uniform", "samples"]),
    ("result", ["first"], ["last", "best", "uniform"]), ("evaluate", ["some"], ["subset", "full"]),
    ("dtype", ["float16"], ["float32", "float64"]), ("on_loss", ["wait"], ["end", "continue"]),
    ("scores", ["bin"], ["auto", "bins", "samples"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "outside", "inside"), RANGES, ids=[case[0] for case in RANGES])
def test_ranges_of_a_runs_settings(name, outside, inside):
    for value in inside:
        assert RunSettings(**RunSettings.filled({name: value})).flat()[name] == value
    for value in outside:
        with pytest.raises(UserError, match=f"^{name} = {value}: expected "):
            RunSettings.filled({name: value})


def test_command_line_goes_before_the_file(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("rounds: 7\nalgorithm: {name: fedavg, step_size: 0.5}\nmodel: mlp\n")
    config = read("--config", file, "--rounds", 8, "--model.hidden", 12)
    assert (config.rounds.rounds, config.algorithm.step_size) == (8, 0.5)
    assert config.model_settings["hidden"] == 12
    file.write_text("algorithm: fedavg\n")
    assert type(read("--config", file).algorithm).__name__ == "FedAvg"


def test_the_folder_of_data_is_that_of_the_setting_or_else_of_the_variable(monkeypatch):
    monkeypatch.setenv("FEDMPI_DATA", "/common")
    assert (read().data.data_dir, read("--data-dir", "/mine").data.data_dir) == ("/common", "/mine")
    monkeypatch.delenv("FEDMPI_DATA")
    assert read().data.data_dir is None


def test_a_file_beside_a_preset_leaves_what_the_preset_says_of_the_paper(tmp_path):
    (tmp_path / "run.yaml").write_text("rounds: 7\n")
    alone = read("--preset", "auc/cifar10")
    both = read("--preset", "auc/cifar10", "--config", tmp_path / "run.yaml")
    assert both.rounds.rounds == 7 != alone.rounds.rounds and both.resolved["paper"] == alone.resolved["paper"]


def test_a_run_of_the_settings_file_in_a_run_folder_gets_a_number(tmp_path):
    """A line says so; not if the command line has a name, the file another one, or its folder no records."""
    folder, text = tmp_path / "trial", "name: trial\nrounds: 7\n"
    folder.mkdir()
    (folder / "config.yaml").write_text(text)
    words = ["--config", str(folder / "config.yaml")]
    assert read_layers(words).notes == [] and read(*words).folder.name == "trial"
    (folder / "metrics.jsonl").touch()
    note = f"{folder} exists: the new run folder gets a number (--name chooses another name)"
    assert read_layers(words).notes == [note] and read(*words).folder.name is None and read(*words).rounds.rounds == 7
    assert read_layers([*words, "--name", "other"]).notes == []
    (folder / "config.yaml").write_text("name: other\n")
    assert read_layers(words).notes == [] and read(*words).folder.name == "other"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--name a/b", "name = a/b: expected the name of a folder, not a path; --out says where it is"),
        ("--baselines local,some", "baselines = local,some: expected some of "),
        (
            "--baselines tuned --private 0.weight",
            "expected no tuned with --private: each client has a model of its own",
        ),
        ("--baselines local --on_loss continue", "expected --on_loss end and --result last or best"),
        ("--baselines local --result uniform", "expected --on_loss end and --result last or best"),
        (
            "--baselines_step_sizes [0.1,0.2]",
            "baselines_step_sizes: expected numbers > 0, --baselines, and --holdout to ",
        ),
        ("--cross_site true", "cross_site: expected --baselines or --private: all clients have the same model"),
        (
            "--baselines local --task saddle",
            "baselines = local: task saddle has no model to train: leave --baselines out",
        ),
        ("--holdout 0.2 --task saddle", "holdout = 0.2: task saddle has no data to hold out; leave --holdout out"),
        (
            "--baselines local --partition.redeal true",
            "partition.redeal = true: no client has data of its own, to train",
        ),
        ("--resume auto", "resume = auto: expected --name, which says which run to continue"),
    ],
)
def test_settings_that_do_not_go_together(words, message):
    with pytest.raises(UserError) as error:
        read(*words.split())
    assert message in str(error.value)


def test_rounds_on_the_command_line_undo_the_epochs_of_a_file(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("epochs: 30\nlocal_epochs: 2\n")
    run = read("--config", file, "--rounds", 8, "--local-steps", 3).rounds
    assert (run.rounds, run.epochs, run.local_steps, run.local_epochs) == (8, None, 3, None)
    assert read("--config", file, "--epochs", 2).rounds.epochs == 2
    assert read("--config", file, "--batch-size", 8).rounds.epochs == 30


def test_toml(tmp_path):
    pytest.importorskip("tomllib")
    file = tmp_path / "run.toml"
    file.write_text('rounds = 7\n[algorithm]\nname = "fedavg"\nstep_size = 0.5\n')
    assert read("--config", file).algorithm.step_size == 0.5


def test_a_class_keeps_its_own_defaults():
    """Choosing another class must not carry values of the default class over."""
    assert read("--algorithm", "fedavg").algorithm.step_size == 0.1
    assert read().algorithm.step_size == 0.003


def test_printed_settings_can_be_read_back(tmp_path):
    words = ("--algorithm", "FedAvg", "--algorithm.step_size", "1e-3", "--partition", "halves", "--epochs", "2.5")
    printed = read_command_line([*words, "--print_config"])
    file = tmp_path / "run.yaml"
    file.write_text(printed)
    assert read_command_line(["--config", str(file), "--print_config"]) == printed
    assert read("--config", file).resolved == read(*words).resolved
    assert yaml.safe_load(printed)["algorithm"]["name"] == "fedavg"


def test_names_with_hyphens_and_any_case():
    config = read("--algorithm", "Naive-Adaptive-FedAvg", "--local-steps=3")
    assert type(config.algorithm).__name__ == "NaiveAdaptiveFedAvg"
    assert config.rounds.local_steps == 3


def test_a_class_by_its_dotted_path():
    config = read("--algorithm", "fedmpi.algorithms.fedavg.FedAvg", "--model", "faulty.Faulty", "--model.kind", "nan")
    assert type(config.algorithm).__name__ == "FedAvg"
    assert config.model_settings == {"kind": "nan", "rank": 1}
    assert config.resolved["model"]["name"] == "faulty.Faulty"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model.hidden", "5"], "unknown setting model.hidden: choose the model by name first"),
        (["--algorithm", "fedmpi.algorithms.fedavg.Nothing"], "cannot be imported"),
        (["--algorithm", "fedmpi.models.mlp.MLP"], "expected a subclass of fedmpi.algorithms.base.Algorithm"),
        (["rounds", "5"], "'rounds': expected an option"),
        (["--rounds"], "--rounds: expected a value after it"),
        (["--list", "nothing"], "expected one of algorithms"),
        (["--task", "quadratic", "--model", "mlp"], "task quadratic does not take a model"),
        (["--algorithm", "fed-ams"], "unknown algorithm 'fed-ams': its name in fedmpi is 'local_amsgrad'"),
        (["--algorithm", "local_sgd"], "its name in fedmpi is 'fedavg'"),
        (["--algorithm", "breaks.Mine"], "algorithm 'breaks.Mine': cannot be imported: ZeroDivisionError"),
        (["--rounds", "2.5"], "rounds = 2.5: expected a whole number"),
        (["--clip-norm", "inf"], "clip_norm = inf: expected a finite number or null"),
        (["--epochs", "1", "--rounds", "2"], "--rounds and --epochs: expected only one of them"),
        (["--local-steps", "3", "--local_epochs", "2"], "--local_steps and --local_epochs: expected only one of them"),
        (["--epochs", "0"], "epochs = 0.0: expected a number > 0"),
        (["--tf32", "perhaps"], "tf32 = perhaps: expected true or false"),
    ],
)
def test_messages(words, message):
    with pytest.raises(UserError) as error:
        read_command_line(words)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", ["- 1\n- 2\n", "rounds: [", "5"])
def test_files_that_are_no_settings(tmp_path, content):
    file = tmp_path / "run.yaml"
    file.write_text(content)
    with pytest.raises(UserError, match=r"run\.yaml"):
        read_command_line(["--config", str(file)])


@pytest.mark.parametrize("kind", CHOICES)
def test_everything_that_can_be_chosen_has_settings_and_help(kind):
    package, base, _ = CHOICES[kind]
    for name in known(package, base):
        words = [f"--{kind}", name]
        assert read_command_line([*words, "--help"]).startswith("usage:")
        if kind != "task":
            assert read(*words).resolved[kind]["name"] == name


def test_help_and_lists():
    text = read_command_line(["--algorithm", "fedavg", "--help"])
    assert "--algorithm.server_step_size" in text
    assert "η_g" in text
    assert "q, local steps between two averages" in text
    assert "fafed  " in read_command_line(["--list", "algorithms"])
    assert "even" in read_command_line(["--list", "partitions"])


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("lr", "algorithm.step_size"),
        ("algorithm.lr", "algorithm.step_size"),
        ("num-rounds", "rounds"),
        ("num_clients", "clients"),
        ("fraction-fit", "participation"),
        ("server_lr", "algorithm.server_step_size"),
        ("proximal-mu", "algorithm.proximal_weight"),
    ],
)
def test_settings_of_other_systems_get_an_answer(theirs, ours):
    with pytest.raises(UserError, match=f"its name in fedmpi is --{ours}[ ,]") as error:
        read_command_line([f"--{theirs}", "0.1"])
    assert "\n" not in str(error.value)


def test_every_answer_is_a_setting():
    """Ours exist, theirs do not: no setting of ours is answered with another."""
    settings = {*RunSettings.declared(), *CHOICES, "data", "autocast"}
    for theirs, ours in ((theirs, one) for theirs, several in table()["ours"].items() for one in several):
        group, _, name = ours.partition(".")
        assert group in settings and theirs not in settings, (theirs, ours)
        classes = known(CHOICES[group].package, CHOICES[group].base).values() if name else ()
        assert not name or any(name in cls.__dataclass_fields__ for cls in classes), ours


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("fedadam --eta", ": its name in fedmpi is --algorithm.server_step_size (more"),
        ("fedadam --eta_l", ": its name in fedmpi is --algorithm.step_size (more"),
        ("scaffold --eta", "--algorithm.step_size or --algorithm.server_step_size (the clients', or the server's)"),
        ("fafed --eta", ": its name in fedmpi is --algorithm.step_size (more"),
        ("fedadam --beta_1", ": its name in fedmpi is --algorithm.momentum (more"),
        ("diloco --beta1", ": its name in fedmpi is --algorithm.first_moment_decay (more"),
        ("diloco --outer_momentum", ": its name in fedmpi is --algorithm.momentum (more"),
        ("fedavg --algorithm.momentum", "unknown setting algorithm.momentum: algorithm fedavg has "),
        ("fedavg --momentum", "--algorithm.momentum, which algorithm fedavg does not have"),
        ("fedavg --clip_value", "unknown setting clip_value; "),
        ("fedavg --cohort_size", "--participation, a share of the clients"),
        ("fedavg --per_device_train_batch_size", "--batch_size (more"),
        ("fedavg --num_train_epochs", "--epochs (more"),
        ("fedavg --learning_rate", "--algorithm.step_size (more"),
        ("fedavg --central_num_iterations", "--rounds (more"),
        ("fedams --server_adapt_param", "--algorithm.epsilon (more"),
        ("fedavg --epochs_per_round", "--local_epochs (more"),
        ("fedavg --centralised", "use --clients 1"),
        ("fedavg --local_only", "use --clients 1 and its own --data"),
        (
            "fedavg --beta_1",
            "--algorithm.first_moment_decay or --algorithm.momentum (the clients', or the server's), which",
        ),
        ("fedadam --lr", "--algorithm.step_size or --algorithm.server_step_size (the clients', or the server's)"),
        ("fedavg --lr", ": its name in fedmpi is --algorithm.step_size (more"),
        ("diloco --server_momentum", ": its name in fedmpi is --algorithm.momentum (more"),
        ("local_adam --server_momentum", "unknown setting server_momentum; --help"),  # its momentum is the clients'
        ("diloco --server_adapt_param", "unknown setting server_adapt_param; --help"),  # its epsilon is the clients'
        ("local_adam --adam_beta1", ": its name in fedmpi is --algorithm.momentum (more"),
        ("fedadam --adam_beta1", "unknown setting adam_beta1; --help"),  # its momentum is the server's
        ("fedadam --adam_epsilon", "unknown setting adam_epsilon; --help"),
        ("fedprox --mu", ": its name in fedmpi is --algorithm.proximal_weight (more"),
        ("fafedzo --mu", ": its name in fedmpi is --oracle.smoothing (more"),
        ("fedavg --num_epochs", "--epochs or --local_epochs (in the whole run, or in a round)"),
        ("fedavg --aggregator", ": its name in fedmpi is --algorithm or --aggregation (more"),
        ("fedavg --dirichlet_alpha", "--partition.concentration, of --partition dirichlet (more"),
        ("fedavg --min_clients", "unknown setting min_clients; --help"),  # not --clients
        ("fedavg --max_steps", "unknown setting max_steps; --help"),  # not --local_steps
        ("fedavg --min_local_steps", "unknown setting min_local_steps; --help"),
        ("fedavg --num_threads", "unknown setting num_threads; --help"),
        ("fedavg --global_epoch", "unknown setting global_epoch; --help"),  # not --local_epochs
        ("fedavg --adam_beta1", "unknown setting adam_beta1; --help"),
        ("fedavg --use_he", "unknown setting use_he; --help"),  # not --seed
        ("fedavg --local_step", "did you mean 'local_steps'?"),
    ],
)
def test_the_answer_to_a_foreign_name_depends_on_the_algorithm(words, answer):
    with pytest.raises(UserError) as error:
        read_command_line(["--algorithm", *words.split(), "1"])
    assert answer in str(error.value), error.value


NO_DATA = ["quadratic", "counterexample", "saddle_quadratic", "two_parameter_auc", "slow", "saddle", "language"]


@pytest.mark.parametrize("task", NO_DATA)
def test_a_partition_is_refused_by_a_task_that_has_nothing_to_split(task):
    for words in (
        ["--partition", "iid"],
        ["--partition.min_samples", "3"],
        ["--preset", "fafed/mnist_low", "--model=null"],
    ):
        with pytest.raises(UserError, match=rf"^partition\S* = \S+: task {task} has no data to partition"):
            read_command_line(["--task", task, *words])
    assert read_command_line(["--task", task, "--partition", "null"]).partition is None
