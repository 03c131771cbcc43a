"""What settings are called in other systems (Flower, NVFlare, FedML, APPFL, FedLab, ...) and in this one."""

_THEIRS = {  # ours -> theirs, in the spelling of `fedmpi.config.grammar`
    "algorithm": "strategy optimizer client_optimizer server_optimizer federated_optimizer aggregator fl_algorithm",
    "algorithm.step_size": "lr learning_rate client_lr local_lr client_learning_rate local_learning_rate eta",
    "algorithm.server_step_size": "server_lr server_learning_rate global_lr outer_lr",
    "algorithm.momentum": "momentum server_momentum outer_momentum beta1 beta_1",
    "algorithm.second_moment_decay": "beta2 beta_2",
    "algorithm.epsilon": "tau eps adam_epsilon",
    "algorithm.proximal_weight": "mu proximal_mu fedprox_mu fedproxloss_mu prox_term",
    "algorithm.schedule": "scheduler lr_scheduler lr_schedule",
    "rounds": "num_rounds n_rounds comm_round comm_rounds communication_rounds num_server_rounds global_rounds "
    "num_global_epochs global_epochs",
    "local_steps": "num_local_steps local_iterations num_local_updates local_updates aggregation_interval sync_every",
    "local_epochs": "num_local_epochs local_epoch aggregation_epochs client_epochs",
    "clients": "num_clients n_clients client_num_in_total num_silos num_supernodes num_nodes num_parties",
    "participation": "fraction_fit fraction_train client_fraction sample_fraction client_num_per_round "
    "clients_per_round frac",
    "weighting": "weighted weighted_aggregation client_weights client_weights_mode",
    "batch_size": "bs batchsize train_batch_size local_batch_size",
    "clip_norm": "max_grad_norm clip_grad clip_grad_norm gradient_clip_val clip_value",
    "weight_decay": "wd l2 l2_reg",
    "data": "dataset dataset_name",
    "model": "model_name net arch",
    "partition": "partition_method partitioner split split_method",
    "partition.concentration": "partition_alpha dirichlet_alpha",
    "seed": "random_seed manual_seed",
    "device": "gpu use_gpu using_gpu cuda gpus client_device",
    "autocast": "amp fp16 bf16 precision mixed_precision",
    "out": "output_dir output_dirname save_dir log_dir logdir workspace job_dir",
    "name": "run_name experiment_name exp_name run_id",
    "eval_every": "frequency_of_the_test eval_freq eval_interval evaluate_every validation_interval",
}
# Settings that FAFED had -> the paper's value, which it always has now; FAFEDCode has them all.
OF_FAFED = {"algorithm.first_step": "plain", "algorithm.sync_order": "paper", "algorithm.prev_grad_scale": "1.0"}
OURS = {theirs: ours for ours, names in _THEIRS.items() for theirs in names.split()}


def our_name(key):
    """The end of a message about the unknown setting `key`, like ": its name in fedmpi is --seed"; or "".

    Args:
        key: like "lr", or "algorithm.lr".
    """
    group, _, name = key.rpartition(".")
    ours = OURS.get(name)
    return f": its name in fedmpi is --{ours}" if ours and ours.startswith(group) else ""
