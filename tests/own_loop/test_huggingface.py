"""Hugging Face's Trainer under mpirun: `fedmpi.huggingface`, with PEFT's adapters."""

import functools
import importlib.util
import json
import sys

import pytest
from helpers import PROGRAMS, ROOT, execute, launchers, start

ARE_HERE = all(map(importlib.util.find_spec, ("transformers", "peft", "accelerate")))
needs_them = pytest.mark.skipif(not ARE_HERE, reason="needs fedmpi[huggingface]: transformers and peft")
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
MOMENTS = ["exp_avg", "exp_avg_sq"]


def fine_tune(folder, ranks=2, mpi="default", code=0, **given):
    """What each rank has found; `code`: of the job, None: any but 0."""
    ended = start(ranks, PROGRAMS / "fine_tunes.py", folder, json.dumps(given), mpi=mpi, env=OFFLINE)
    assert (ended.returncode == code) if code is not None else ended.returncode, ended.stderr
    if code == 0:
        return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(ranks)], ended.stderr
    return None, ended.stderr


@functools.cache
def unbroken(folder, text):
    """As `fine_tune`, once for each of the settings (as JSON)."""
    return fine_tune(folder / "unbroken", **json.loads(text))


@needs_them
@pytest.mark.parametrize("mpi", launchers())
def test_adapters_are_averaged_and_load_elsewhere(tmp_path, mpi):
    import torch
    from fine_tunes import make_model
    from peft import PeftModel
    from safetensors.torch import load_file

    (first, second), printed = fine_tune(tmp_path, mpi=mpi)
    assert first["trained"] == second["trained"] and first["base_stays"] and second["base_stays"]
    assert first["accounts"]["round"] == 4 and first["accounts"]["bytes"] == 4 * first["trained_bytes"] == 4 * 4096
    assert first["output_dir"] == str(tmp_path) and second["output_dir"] == str(tmp_path / "rank-1")
    assert f"rank 0 saves in {tmp_path}, rank 1 in {tmp_path}/rank-1, and so on" in printed
    for folder in ("final", "checkpoint-10", "checkpoint-20"):
        ours, theirs = (
            load_file(path / folder / "adapter_model.safetensors") for path in (tmp_path, tmp_path / "rank-1")
        )
        assert sum(value.nbytes for value in ours.values()) == 4096
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    base = make_model({"lora": False, "dropout": 0.1, "dtype": "float32", "checkpointing": None, "quantised": False})
    loaded = PeftModel.from_pretrained(base, tmp_path / "final")
    assert any(value.abs().sum() > 0 for name, value in loaded.named_parameters() if "lora_B" in name)


@needs_them
@pytest.mark.parametrize("labelled", [[12, 12], [12, 3]])
def test_by_default_it_is_the_training_of_one_process_with_all_data(tmp_path, labelled):
    """In each step all samples, which the silos have in unequal numbers, also of labels; gradients are clipped."""
    from safetensors.torch import load_file

    given = {
        "dropout": 0.0,
        "max_grad_norm": 0.1,
        "weight_decay": 0.1,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 3,
    }
    given |= {"numbers": [48, 16], "labelled": labelled, "max_steps": 15, "save_strategy": "no", "logging_steps": 1}
    found, printed = fine_tune(tmp_path / "silos", federation={}, per_device_train_batch_size=48, **given)
    assert found[0]["trained"] == found[1]["trained"]
    assert found[0]["accounts"]["round"] == 15 and found[0]["accounts"]["bytes"] == 15 * 4096
    assert "the gradients are averaged in each step: 4.0 KiB per rank and average (every=10 averages" in printed
    assert "; weights: numbers of samples (16 to 48), times the labels of a sample where the loss is a mean" in printed
    fine_tune(tmp_path / "pooled", ranks=1, pooled=True, per_device_train_batch_size=64, **given)
    ours, pooled = (load_file(tmp_path / name / "final" / "adapter_model.safetensors") for name in ("silos", "pooled"))
    assert all((ours[name] - value).abs().max() < 1e-5 for name, value in pooled.items())
    assert found[0]["max_grad_norm"] == given["max_grad_norm"]


@needs_them
@pytest.mark.parametrize(
    "given",
    [
        {"federation": {}, "save_steps": 3, "gradient_accumulation_steps": 2},
        {},
        {"federation": {"every": 4, "outer": "nesterov", "exchange": MOMENTS}, "save_steps": 3},
        {"federation": {"every": 4}, "save_steps": 3, "gradient_accumulation_steps": 2},
        {"federation": {"algorithm": "fafed", "local_steps": 4}, "save_steps": 3, "gradient_accumulation_steps": 2},
        {"lora": False, "dtype": "bfloat16", "federation": {"every": 4}, "save_steps": 3},
    ],
    ids=["gradients", "callback", "outer", "accumulation", "algorithm", "bfloat16"],
)
def test_killed_and_resumed_by_trainers_own_means_it_has_the_same_bits(tmp_path, given):
    whole, _ = fine_tune(tmp_path / "whole", **given)
    assert whole[0]["trained"] == whole[1]["trained"]
    fine_tune(tmp_path / "killed", kill=[1, 13], code=None, **given)
    resumed, _ = fine_tune(tmp_path / "killed", resume=True, **given)
    assert [found["trained"] for found in resumed] == [found["trained"] for found in whole]


@needs_them
def test_resumed_under_many_settings_it_has_the_same_bits(tmp_path):
    """Schedules, accumulation, 16 bits and streams: all in one job, which lost its later checkpoints."""
    ended = start(2, PROGRAMS / "resumes_trainers.py", tmp_path, env=OFFLINE)
    assert ended.returncode == 0, ended.stderr
    found = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("[")]
    assert len(found) == 8
    for name, whole, resumed in found:
        assert len({*whole}) == 1 and resumed == whole, name


@needs_them
def test_a_checkpoint_that_one_rank_lacks_is_not_used(tmp_path):
    fine_tune(tmp_path, max_steps=15)
    (tmp_path / "rank-1" / "checkpoint-15" / "fedmpi.json").unlink()
    _, printed = fine_tune(tmp_path, resume=True)
    for folder in (tmp_path, tmp_path / "rank-1"):
        assert f"{folder}/checkpoint-15 is not complete on all ranks: it is called incomplete-15" in printed
        assert (folder / "incomplete-15").is_dir()


@needs_them
def test_no_rank_continues_from_another_ones_checkpoint(tmp_path):
    fine_tune(tmp_path, max_steps=10)
    _, printed = fine_tune(tmp_path, resume=str(tmp_path / "checkpoint-10"), code=None)
    assert f"rank 1 continues from a checkpoint of rank 0: expected one in {tmp_path}/rank-1" in printed


@needs_them
@pytest.mark.parametrize(
    ("lora", "federation"),
    [(True, {"every": 5}), (False, {"every": 5}), (True, {}), (False, {})],
    ids=["adapters", "whole", "adapters, gradients", "whole, gradients"],
)
def test_files_at_an_average_and_between_two_have_the_right_size_and_load(tmp_path, lora, federation):
    import torch
    from fine_tunes import make_model
    from safetensors.torch import load_file

    given = {"lora": lora, "dropout": 0.1, "dtype": "float32", "checkpointing": None, "quantised": False}
    fine_tune(tmp_path, save_strategy="no", max_steps=10, saves=[5, 7], lora=lora, federation=federation)
    model = make_model(given)
    whole = sum(p.nbytes for p in model.parameters())
    for folder in (tmp_path / f"step-{step}-rank-{rank}" for step in (5, 7) for rank in (0, 1)):
        for kind in (folder, folder / "saved"):
            values = load_file(kind / ("adapter_model.safetensors" if lora else "model.safetensors"))
            assert sum(value.nbytes for value in values.values()) == (4096 if lora else whole)
        assert whole <= (folder / "state" / "model.safetensors").stat().st_size < 1.1 * whole + 10_000
        model.load_state_dict(torch.load(folder / "state.pt"))
        pickled = torch.load(folder / "model.pt", weights_only=False)
        assert all(map(torch.equal, model.parameters(), pickled.parameters()))
        for name in ("state.pt", "model.pt"):
            assert whole < (folder / name).stat().st_size < 1.5 * whole + 50_000
    first, second = (torch.load(tmp_path / f"step-5-rank-{rank}" / "state.pt") for rank in (0, 1))
    assert all(torch.equal(first[name], second[name]) for name in first)


@needs_them
def test_the_best_model_is_the_same_on_all_ranks(tmp_path):
    given = {"eval_strategy": "steps", "eval_steps": 5, "load_best_model_at_end": True, "evaluates": True}
    (first, second), _ = fine_tune(tmp_path, metric_for_best_model="loss", greater_is_better=False, **given)
    assert first["best"] == second["best"] and first["trained"] == second["trained"]
    _, printed = fine_tune(tmp_path / "other", federation={"every": 3}, code=None, **given)
    assert "there is an evaluation every 5 steps and an average every 3: expected a multiple" in printed


@needs_them
@pytest.mark.parametrize("algorithm", [None, "fafed"])
@pytest.mark.parametrize("how", ["reentrant", "plain"])
def test_gradient_checkpointing_changes_no_bit(tmp_path, algorithm, how):
    federation = {"algorithm": algorithm, "local_steps": 5} if algorithm else {"every": 5}
    given = {"federation": federation, "max_steps": 10, "save_strategy": "no", "dropout": 0.0}
    plain, _ = fine_tune(tmp_path / "plain", **given)
    recomputed, _ = fine_tune(tmp_path / "recomputed", checkpointing=how, **given)
    assert recomputed[0]["trained"] == recomputed[1]["trained"] == plain[0]["trained"]


@needs_them
@pytest.mark.parametrize("algorithm", [None, "fafed"])
def test_full_training_in_bfloat16_with_tied_weights(tmp_path, algorithm):
    """What is sent is float32: the masters."""
    federation = {"algorithm": algorithm, "local_steps": 5} if algorithm else {"every": 5}
    given = {"federation": federation, "save_strategy": "no", "dropout": 0.0, "learning_rate": 0.005}
    (first, second), _ = fine_tune(tmp_path, lora=False, dtype="bfloat16", **given)
    assert first["trained"] == second["trained"] and first["dtypes"] == ["torch.bfloat16"] and first["tied"]
    rows = first["accounts"]["bytes"] / first["trained_bytes"] / first["accounts"]["round"]
    assert 1 <= rows < 1.02 if algorithm is None else rows >= 2  # parameters begin on cache lines; FAFED sends 3 rows
    assert first["loss"] < 4.1


@needs_them
def test_a_quantised_base_is_left_as_it_is(tmp_path):
    found, _ = fine_tune(tmp_path, quantised=True, save_strategy="no", max_steps=10)
    assert found[0]["trained"] == found[1]["trained"] and found[0]["base_stays"]
    assert found[0]["accounts"]["bytes"] == 2 * 4096


@needs_them
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"federation": {"every": 0}}, "every = 0: expected a whole number > 0"),
        ({"federation": {"algorithm": "fafed", "step_size": 0.1}}, "step_size = 0.1: give learning_rate to Training"),
        ({"federation": {"algorithm": "fafedd"}}, "unknown algorithm 'fafedd'"),
        ({"federation": {"algorithm": "fafed"}, "fp16": True}, "fp16 = True: scaled losses have scaled gradients"),
        ({"federation": {}, "fp16": True}, "fp16 = True: scaled losses have scaled gradients"),
        ({"federation": {"outer": "adam"}}, "outer = 'adam', every = None: expected a number of local steps with it"),
        ({"federation": {"evry": 3}}, "unknown setting evry: outer none has server_step_size"),
        ({"federation": {"model": 1}}, "model: Trainer's own is used: leave it out"),
        ({"resume": True}, "No valid checkpoint found"),
    ],
)
def test_wrong_arguments_are_one_line(tmp_path, given, message):
    _, printed = fine_tune(tmp_path, code=None, **given)
    assert message in printed


@needs_them
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"numbers": [8, 64], "save_strategy": "epoch"},
            "save_strategy is epoch (every 2) on rank 0",
        ),
        (
            {"numbers": [8, 64], "eval_strategy": "epoch", "evaluates": True},
            "eval_strategy is epoch (every 2) on",
        ),
        ({"numbers": [8, 64], "max_steps": -1, "num_train_epochs": 1}, "max_steps is 2 on rank 0, 16 on rank 1"),
        ({"adds": True}, "FederatedCallback was added to a Trainer: expected Trainer(..., callbacks=[...]) with it"),
        ({"fails": 1}, "fails by itself"),
        (
            {"federation": {}, "rates": [0.01, 0.02]},
            "lr of parameter group 0 is 0.01 on rank 0, 0.02 on rank 1",
        ),
    ],
)
def test_what_would_differ_later_ends_the_job_before_the_first_step(tmp_path, given, message):
    _, printed = fine_tune(tmp_path, code=None, **given)
    assert message in printed


@needs_them
def test_early_stopping_ends_all_ranks_even_before_the_callback(tmp_path):
    """The accuracy is the rank's number in even evaluations: one rank would stop, the other not."""
    given = {"eval_strategy": "steps", "eval_steps": 5, "load_best_model_at_end": True, "evaluates": True}
    found, _ = fine_tune(tmp_path, stops_early=True, metric_for_best_model="accuracy", **given)
    assert found[0]["trained"] == found[1]["trained"] and found[0]["best"] == found[1]["best"]
    assert found[0]["accounts"]["round"] == 2


@needs_them
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs trl")
def test_trls_trainer_for_instructions_takes_the_callback(tmp_path):
    found, _ = fine_tune(tmp_path, sft=True, federation={}, max_steps=6, save_steps=3)
    assert found[0]["trained"] == found[1]["trained"] and found[0]["base_stays"]
    assert found[0]["accounts"]["bytes"] == 6 * 4096


@needs_them
def test_frozen_factors_stay_equal(tmp_path):
    """FFA-LoRA: half of the bytes."""
    found, _ = fine_tune(tmp_path, federation={"every": 5, "freeze": "*lora_A*"}, save_strategy="no")
    assert found[0]["trained"] == found[1]["trained"]
    assert found[0]["accounts"]["bytes"] < 4 * 4096


NO_TRAINER = """
class Lazy(type(sys)):
    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            import safetensorz
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(f"Could not import module '{name}'.") from error

sys.modules["accelerate"], sys.modules["transformers"] = type(sys)("accelerate"), Lazy("transformers")
"""


@pytest.mark.parametrize(
    ("program", "missing"),
    [
        ("sys.modules['accelerate'] = type(sys)('accelerate'); sys.modules['transformers'] = None", "transformers"),
        ("sys.modules['accelerate'] = None", "accelerate"),
        (NO_TRAINER, "safetensorz"),
    ],
    ids=["transformers", "accelerate", "what transformers needs"],
)
def test_one_line_says_what_to_install(program, missing):
    ended = execute([sys.executable, "-c", f"import sys\n{program}\nimport fedmpi.huggingface"], cwd=ROOT)
    assert f"fedmpi.huggingface needs {missing}: pip install 'fedmpi[huggingface]'" in ended.stderr


@pytest.mark.parametrize("mpi", launchers())
def test_ranks_that_look_alone_to_other_libraries_find_each_other(mpi):
    ended = start(2, PROGRAMS / "hides.py", mpi=mpi)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["well", "well"]
    ended = start(2, PROGRAMS / "hides.py", "ends", mpi=mpi)
    assert ended.returncode and "rank 1" in ended.stderr


def test_nothing_else_loads_these_libraries():
    words = (
        "import importlib, pkgutil, sys, fedmpi\n"
        "for module in pkgutil.walk_packages(fedmpi.__path__, 'fedmpi.'):\n"
        "    if module.name != 'fedmpi.huggingface':\n"
        "        importlib.import_module(module.name)\n"
        "print(*sys.modules)"
    )
    ended = execute([sys.executable, "-c", words], cwd=ROOT)
    assert "fedmpi.own_loop.average" in ended.stdout.split()
    assert not {"transformers", "peft", "accelerate", "lightning", "fedmpi.huggingface"} & {*ended.stdout.split()}
