"""What settings are called in other systems (Flower, NVFlare, FedML, APPFL, pfl, OpenFL, ...) and in this one."""

from collections.abc import Collection, Container

from fedmpi.ground.settings import nearest

_THEIRS = {  # ours -> theirs, in the spelling of `fedmpi.config.grammar`
    "algorithm": "strategy optimizer client_optimizer server_optimizer federated_optimizer aggregator fl_algorithm",
    "aggregation": "aggregator",
    "algorithm.step_size": "lr learning_rate client_lr local_lr client_learning_rate local_learning_rate eta_l eta",
    "algorithm.server_step_size": "server_lr server_learning_rate global_lr outer_lr central_lr central_learning_rate "
    "eta lr learning_rate",
    "algorithm.first_moment_decay": "beta1 beta_1 adam_beta1",
    "algorithm.momentum": "momentum server_momentum outer_momentum beta1 beta_1 adam_beta1 server_momentum_param_1",
    "algorithm.second_moment_decay": "beta2 beta_2 adam_beta2 server_momentum_param_2",
    "algorithm.epsilon": "tau eps adam_epsilon adaptivity_degree server_adapt_param",
    "algorithm.proximal_weight": "mu proximal_mu fedprox_mu fedproxloss_mu prox_term",
    "oracle.smoothing": "mu",
    "algorithm.schedule": "lr_scheduler lr_schedule lr_scheduler_type",
    "rounds": "num_rounds n_rounds comm_round comm_rounds communication_rounds num_server_rounds global_rounds "
    "num_global_epochs global_epochs central_num_iterations rounds_to_train",
    "local_steps": "num_local_steps local_iterations num_local_updates local_updates aggregation_interval sync_every "
    "local_num_steps local_sgd_steps num_inner_steps",
    "epochs": "num_train_epochs num_epochs",
    "local_epochs": "num_epochs num_local_epochs local_epoch aggregation_epochs client_epochs local_num_epochs "
    "epochs_per_round",
    "clients": "num_clients n_clients client_num_in_total num_silos num_supernodes num_parties "
    "num_collaborators collaborator_count population",
    "participation": "fraction_fit fraction_train client_fraction sample_fraction client_num_per_round "
    "clients_per_round cohort_size train_cohort_size frac eligible_perc sample_ratio",
    "weighting": "weighted weighted_aggregation client_weights client_weights_mode",
    "batch_size": "bs batchsize train_batch_size local_batch_size per_device_train_batch_size",
    "clip_norm": "max_grad_norm clip_grad_norm gradient_clip_val local_max_grad_norm",
    "weight_decay": "wd l2 l2_reg",
    "data": "dataset dataset_name",
    "model": "model_name net arch",
    "partition": "partition_method partitioner split_method",
    "partition.concentration": "partition_alpha dirichlet_alpha",
    "seed": "random_seed manual_seed",
    "device": "gpu use_gpu using_gpu gpu_id cuda client_device",
    "autocast": "amp fp16 bf16 precision mixed_precision amp_dtype",
    "out": "output_dir output_dirname save_dir log_dir logdir logging_dir workspace job_dir",
    "name": "run_name experiment_name exp_name run_id",
    "eval_every": "frequency_of_the_test eval_freq eval_interval evaluate_every validation_interval "
    "evaluation_frequency",
    "init": "initial_ckpt",
    "stop": "stop_cond",
    "resume": "resume_from_checkpoint",
    "track": "report_to",
    "data_dir": "data_cache_dir",
}
# Settings that FAFED had -> the paper's value, which it always has now; FAFEDCode has them all.
OF_FAFED = {"algorithm.first_step": "plain", "algorithm.sync_order": "paper", "algorithm.prev_grad_scale": "1.0"}
OURS: dict[str, list[str]] = {}  # theirs -> ours, more than one if it has several meanings
for _ours, _names in _THEIRS.items():
    for _theirs in _names.split():
        OURS.setdefault(_theirs, []).append(_ours)
_ADAPTIVE = ("fedadam", "fedyogi", "fedadagrad", "fedams")  # Flower's eta is the server's here, and eta_l the clients'
_ON_SERVER = (*_ADAPTIVE, "fedavgm", "mimeadam")  # whose momentum, second moment and epsilon are the server's
_OF_SERVER = """server_momentum outer_momentum server_momentum_param_1 server_momentum_param_2 server_adapt_param tau
    adaptivity_degree"""
_COUNTS = ("client_num_per_round", "clients_per_round", "cohort_size", "train_cohort_size")
_MEANINGS = {  # of the two names of which this is the first
    "algorithm.step_size": " (the clients', or the server's)",
    "algorithm.first_moment_decay": " (the clients', or the server's)",
    "epochs": " (in the whole run, or in a round)",
}
# Their settings without a counterpart, which look like some of ours.
_NO_COUNTERPART = """fraction_evaluate min_fit_clients min_evaluate_nodes evaluate_fn on_fit_config_fn
    weighted_by_key round_timeout clipping_norm initial_clipping_norm clip_norm_lr client_resources min_clients
    aggregation_weights aggregator_id aggregator_kwargs train_timeout task_name lr_scheduler_args train_script
    key_metric mode val_batch_size clip_grad clip_value do_validation do_pre_validation use_dp client_id trainer
    central_eval_batch_size last_state_path init_state_path delegate max_steps warmup_steps logging_steps save_steps
    eval_steps eval_strategy devices auto_find_batch_size global_step split client_config per_site_config
    train_configs weight global_epoch checkpoint_dir tasks task_data"""
_ADVICE = {
    "centralised": "to train on all data in one place, use --clients 1",
    "local_only": "to train a silo by itself, use --clients 1 and its own --data",
}
_ADVICE["centralized"] = _ADVICE["centralised"]


def our_names(name: str, known: Container[str], algorithm: str = "") -> list[str]:
    """Our names of a foreign one, like "eta": those among the `known` keys of settings, or if there are none, all."""
    ours = OURS.get(name, [])
    found = [our_key for our_key in ours if our_key in known]
    on_server = algorithm in _ON_SERVER or "algorithm.step_size" not in known  # the clients of `average` are torch's
    if name in ("lr", "learning_rate") and algorithm not in (*_ADAPTIVE, "fedavgm"):  # the clients', in all systems
        return ours[:1]
    if name == "eta" and algorithm in _ADAPTIVE:
        return ["algorithm.server_step_size"]
    if found and name in _OF_SERVER.split() and not on_server:
        return [our_key for our_key in found if algorithm == "diloco" and our_key == "algorithm.momentum"]
    if name.startswith("adam_") and (on_server or not found):  # of clients whose steps are Adam's
        return []
    if "algorithm.first_moment_decay" in found:  # the inner optimizer's; momentum is the outer one's
        return found[:1]
    return found or [our_key for our_key in ours if not our_key.startswith("oracle.")]


def similar(name: str, known: Collection[str]) -> str:
    """`nearest`, but for slips of the keys only: a foreign name without a counterpart here gets no guess."""
    words = set(name.split("_"))
    near = [key for key in known if not set(key.split("_")) < words]  # min_local_steps is not local_steps
    return "" if name in _NO_COUNTERPART.split() or name in OURS else nearest(name, near, 0.8)


def our_name(key: str, known: Container[str], algorithm: str = "") -> str:
    """The end of a message about the unknown setting `key`, like ": its name in fedmpi is --seed"; or ""."""
    group, _, name = key.rpartition(".")
    if not group and name in _ADVICE:
        return f": {_ADVICE[name]}"
    ours = [our_key for our_key in our_names(name, known, algorithm) if our_key.startswith(group) and our_key != key]
    if not ours:
        return ""
    text = f": its name in fedmpi is {' or '.join(f'--{our_key}' for our_key in ours)}"
    if len(ours) == 2:
        text += _MEANINGS.get(ours[0], "")
    if ours[0] == "partition.concentration":
        text += ", of --partition dirichlet"
    elif ours[0] not in known:
        text += f", which algorithm {algorithm} does not have"
    return text + ", a share of the clients" * (name in _COUNTS)
