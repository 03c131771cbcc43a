"""What settings are called in other systems (Flower, NVFlare, FedML, APPFL, pfl, OpenFL, ...) and in this one."""

_THEIRS = {  # ours -> theirs, in the spelling of `fedmpi.config.grammar`
    "algorithm": "strategy optimizer client_optimizer server_optimizer federated_optimizer aggregator fl_algorithm",
    "algorithm.step_size": "lr learning_rate client_lr local_lr client_learning_rate local_learning_rate eta_l eta",
    "algorithm.server_step_size": "server_lr server_learning_rate global_lr outer_lr central_lr central_learning_rate "
    "eta",
    "algorithm.momentum": "momentum server_momentum outer_momentum beta1 beta_1 adam_beta1 server_momentum_param_1",
    "algorithm.first_moment_decay": "beta1 beta_1 adam_beta1",
    "algorithm.second_moment_decay": "beta2 beta_2 adam_beta2 server_momentum_param_2",
    "algorithm.epsilon": "tau eps adam_epsilon adaptivity_degree server_adapt_param",
    "algorithm.proximal_weight": "mu proximal_mu fedprox_mu fedproxloss_mu prox_term",
    "algorithm.schedule": "scheduler lr_scheduler lr_schedule lr_scheduler_type",
    "rounds": "num_rounds n_rounds comm_round comm_rounds communication_rounds num_server_rounds global_rounds "
    "num_global_epochs global_epochs central_num_iterations rounds_to_train",
    "local_steps": "num_local_steps local_iterations num_local_updates local_updates aggregation_interval sync_every "
    "local_num_steps",
    "local_epochs": "num_local_epochs local_epoch aggregation_epochs client_epochs local_num_epochs epochs_per_round",
    "epochs": "num_train_epochs num_epochs",
    "clients": "num_clients n_clients client_num_in_total num_silos num_supernodes num_nodes num_parties "
    "num_collaborators collaborator_count",
    "participation": "fraction_fit fraction_train client_fraction sample_fraction client_num_per_round "
    "clients_per_round cohort_size frac",
    "weighting": "weighted weighted_aggregation client_weights client_weights_mode",
    "batch_size": "bs batchsize train_batch_size local_batch_size per_device_train_batch_size",
    "clip_norm": "max_grad_norm clip_grad_norm gradient_clip_val local_max_grad_norm",
    "weight_decay": "wd l2 l2_reg",
    "data": "dataset dataset_name",
    "model": "model_name net arch",
    "partition": "partition_method partitioner split split_method",
    "partition.concentration": "partition_alpha dirichlet_alpha",
    "seed": "random_seed manual_seed",
    "device": "gpu use_gpu using_gpu cuda gpus client_device",
    "autocast": "amp fp16 bf16 precision mixed_precision",
    "out": "output_dir output_dirname save_dir log_dir logdir logging_dir workspace job_dir",
    "name": "run_name experiment_name exp_name run_id",
    "eval_every": "frequency_of_the_test eval_freq eval_interval evaluate_every validation_interval "
    "evaluation_frequency",
}
# Settings that FAFED had -> the paper's value, which it always has now; FAFEDCode has them all.
OF_FAFED = {"algorithm.first_step": "plain", "algorithm.sync_order": "paper", "algorithm.prev_grad_scale": "1.0"}
OURS: dict[str, list[str]] = {}  # theirs -> ours, more than one if it has several meanings
for _ours, _names in _THEIRS.items():
    for _theirs in _names.split():
        OURS.setdefault(_theirs, []).append(_ours)
_SERVERS_ETA = ("fedadam", "fedyogi", "fedadagrad", "fedams")  # in Flower, eta is the server's and eta_l the clients'
_COUNTS = ("client_num_per_round", "clients_per_round", "cohort_size")
_ADVICE = {
    "centralised": "to train on all data in one place, use --clients 1",
    "local_only": "to train a silo by itself, use --clients 1 and its own --data",
}
_ADVICE["centralized"] = _ADVICE["centralised"]


def our_names(name, known, algorithm=""):
    """Our names of a foreign one: those among `known`, or if there are none, all.

    Args:
        name: like "eta". known: keys of the settings that can be chosen. algorithm: the chosen one's name.
    """
    ours = OURS.get(name, [])
    found = [one for one in ours if one in known]
    if name == "eta" and algorithm in _SERVERS_ETA:
        return ["algorithm.server_step_size"]
    if "algorithm.first_moment_decay" in found:  # the inner optimizer's; momentum is the outer one's
        return ["algorithm.first_moment_decay"]
    return found or ours


def our_name(key, known, algorithm=""):
    """The end of a message about the unknown setting `key`, like ": its name in fedmpi is --seed"; or "".

    Args:
        key: like "lr", or "algorithm.lr". known, algorithm: see `our_names`.
    """
    group, _, name = key.rpartition(".")
    if not group and name in _ADVICE:
        return f": {_ADVICE[name]}"
    ours = [one for one in our_names(name, known, algorithm) if one.startswith(group) and one != key]
    if not ours:
        return ""
    text = f": its name in fedmpi is {' or '.join(f'--{one}' for one in ours)}"
    if len(ours) == 2:
        text += " (the clients', or the server's)"
    if ours[0] not in known:
        text += f", which algorithm {algorithm} does not have"
    return text + ", a share of the clients" * (name in _COUNTS)
