"""Words of other libraries and papers, each with what fedsim calls it, for hints in error messages.

`fedsim.core.suggestions` compares phrases, such as `clients_per_round`, by the set of their words. A phrase matches
in any order, in the singular and the plural, and without the words of `IGNORED`: `num_clients`, `clientNumber`.
"""

from __future__ import annotations


def _split_words(table: dict[str, str]) -> dict[str, str]:
    """Return a dict with a separate entry for each name in a key: {"a b": x} becomes {"a": x, "b": x}."""
    return {word: meaning for words, meaning in table.items() for word in words.split()}


IGNORED = frozenset(_split_words({"num n nb number count total of per each use is enable with do the my": ""}))

# Words with the same meaning. Words of two parts are replaced first.
SAME = {
    **dict.fromkeys(("learning_rate", "step_size", "learnrate", "stepsize", "eta"), "lr"),
    **dict.fromkeys(("batch_size", "mini_batch", "minibatch", "bs"), "batch"),
    **dict.fromkeys(("data_set", "datasets"), "dataset"),
    **_split_words(
        {
            "worker node user participant party partie agent peer supernode silo site": "client",
            "byz malicious attacker adversary adversarie adversarial faulty poisoned corrupted": "byzantine",
            "frac ratio rate share percentage percent pct portion proportion prob probability": "fraction",
            "iter itr": "iteration",
            "global outer central": "server",
            "inner": "local",
            "optimiser optim opt": "optimizer",
            "aggregation agg aggr gar defense defence combiner": "aggregator",
            "eval evaluation evaluating": "evaluate",
            "val valid": "validation",
            "testing": "test",
            "lamda lambd": "lambda",
            "dir folder directory": "path",
            "freq frequency interval gap": "every",
            "ckpt": "checkpoint",
            "comm communication": "communication",
            "compressor compressed compress": "compression",
        }
    ),
}

# Names of attributes and recorded numbers, each with the names that it may mean.
NAMES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("accuracy", "acc", "test_acc"), ("test_accuracy",)),
    "loss": ("test_loss", "train_loss"),
    **dict.fromkeys(("to_pandas", "to_df", "dataframe", "df"), ("to_dataframe",)),
    **dict.fromkeys(
        ("personal_accuracy", "personalized_accuracy", "local_accuracy", "client_accuracy"), ("worker_accuracy",)
    ),
}

# What to write instead of a phrase, where {} stands for the value. A phrase may begin with a table (sampling_fraction),
# and end with the value (partition_random) or its kind: `fraction` for a number between 0 and 1, `list` for a list.
ANSWERS: dict[str, str] = _split_words(
    {
        # workers and rounds
        "clients clients_k k nc n world_size population": "workers={}",
        "client_round cohort_clients cohort sampled_clients selected_clients active_clients fit_clients "
        "min_fit_clients min_train_clients": "cohort={}",
        "c jr clients_fraction fit_fraction fraction_train min_fraction sample_fraction sampling_fraction "
        "join_fraction participation participation_fraction selection_fraction cohort_fraction active_fraction "
        "fraction_round client_fraction_round sampled_clients_fraction client_sample_fraction "
        "client_sampling_fraction fraction_selected_clients": (
            "cohort=N, where N is the number of workers in each round"
        ),
        "fraction": (
            "cohort=N for the number of workers in each round, or attack.fraction={} for the fraction of attackers"
        ),
        "rjr random_join_fraction": "sampling=poisson for cohorts of random size",
        "min_available_clients available_clients": (
            "workers={} sets the number of workers, which are all available unless sampling=daily"
        ),
        "fraction_evaluate min_evaluate_clients evaluate_clients": (
            "the global model is always tested on the whole test set; data.local_test_fraction=0.2 also tests workers"
        ),
        "rounds server_rounds communication_rounds communication rounds_fl federated_rounds training_rounds "
        "train_rounds server_epochs server_iterations iterations train_iterations training_iterations gr t r "
        "max_rounds max_iterations": "rounds={}",
        "max_epochs": "rounds={} or local.epochs={}",
        "epochs e local_epochs client_epochs epochs_round local_ep ep epochs_clients_round train_epochs "
        "training_epochs ls epochs_fit_config local_epoch_client": "local.epochs={}",
        "epoch_steps steps local_steps client_steps max_steps local_iterations local_updates client_iterations h "
        "update_steps steps_round local_steps_round iterations_round sync_every steps_sync": "local.steps={}",
        "b batch local_batch client_batch train_batch training_batch lbs device_train_batch": "local.batch_size={}",
        "test_batch evaluate_batch validation_batch": "tests choose the size of their batches; there is no such key",
        "seed_everything random_seed random_state manual_seed rng_seed rng": "seed={}",
        "times repeat repetitions runs trials seeds": "fedsim compare seed=0,1,2 repeats a run with several seeds",
        "s": "seed={}, or partition.s={} with partition=shards",
        # training
        "lr l_r": "local.lr={} or server.lr={}",
        "local_lr client_lr llr train_lr training_lr": "local.lr={}",
        "server_lr slr": "server.lr={}",
        "lr_scheduler scheduler lr_schedule local_scheduler lr_policy lrs": "local.schedule={} or server.schedule={}",
        "lr_decay lr_gamma decay ld ldg learning_rate_decay_gamma lr_decay_fraction": (
            "local.schedule=exponential local.schedule.gamma={}"
        ),
        "warmup_rounds warmup_epochs warmup_steps lr_warmup": "local.schedule.warmup={}",
        "server_momentum": "server=momentum server.beta={}",
        "optimizer": "local.algorithm={} or server={}",
        "local_optimizer client_optimizer": "local.algorithm={}",
        "server_optimizer": "server={}",
        "wd l2 l2_reg l2_lambda decay_weight weight_decay_fraction l2_regularization": "local.weight_decay={}",
        "gradient_clip_val grad_clip clip_grad_norm max_grad_norm gradient_clip gradient_clipping clip_value "
        "grad_clipping gradient_clip_norm clip_norm max_norm grad_norm": "local.clip_norm={}",
        "clip clipping clipping_norm": (
            "local.clip_norm={} for gradients, privacy.clip={} for privacy, or "
            """processors='[{name="clip",max_norm=1.0}]' for updates"""
        ),
        "accumulate_grad_batches accumulate gradient_accumulation grad_accumulation gradient_accumulation_steps "
        "grad_accumulation_steps accumulation": "local.accumulation_steps={}",
        "train trainable_parameters": "local.trainable={}",
        "max_rows": "batched.max_workers={}",
        "mu prox_mu proximal_mu prox proximal fedprox_mu": "local.algorithm=fedprox local.mu={}",
        "lambda reg_lambda": "local.algorithm=ditto local.lam={}",
        "loss losses criterion loss_fn loss_function loss_func": (
            "the loss belongs to the task: task=binary, or a loss such as task=torch.nn.functional:mse_loss"
        ),
        "l1 l1_loss mae_loss": "task=regression task.loss=l1",
        "huber huber_loss smooth_l1": "task=regression task.loss=huber",
        "bce logits binary_cross_entropy bcewithlogitsloss": "task=binary",
        "ce nll nll_loss crossentropy crossentropyloss cross_entropy_loss": "task=classification",
        "mse_loss mseloss l2_loss": "task=mse",
        "shuffle shuffle_data": "samples are always shuffled in every epoch; there is no such key",
        "finetune fine_tuning fine_tune_epochs fine_tuning_epochs ften finetune_epochs": (
            "worker_evaluation.fine_tune={}"
        ),
        # algorithms
        "algorithm algo fl_algorithm method fl_method strategy strategies fl_strategy strategy_name alg": (
            "aggregate.rule={}, local.algorithm={}, server={} or policy={}"
        ),
        "fedavg federated_averaging fed_avg localsgd local_sgd vanilla": (
            "aggregate.rule=weighted_mean local.algorithm=sgd server=sgd, which is the default"
        ),
        "fedsgd dsgd minibatch_sgd parallel_sgd": "sync=gradients",
        "fedadam fedopt": "server=adam",
        "fedyogi": "server=yogi",
        "fedadagrad": "server=adagrad",
        "fedavgm fed_avgm": "server=momentum",
        "fedmedian": "aggregate.rule=median",
        "fedtrimmedavg fed_trimmed_avg tm trmean cwtm trimmedmean": "aggregate.rule=trimmed_mean",
        "fedasgd asyncfl async_fl fedasync": "mode=clock policy=fedasync",
        "peravg perfedavg fomaml maml": "local.algorithm=per_fedavg",
        "sam sharpness_aware": "local.algorithm=fedsam",
        "local standalone": "local.algorithm=local_only",
        "q_fedavg q_ffl qffl": "aggregate.rule=qfedavg",
        "decentralized dfl d_psgd dpsgd p2p": "mode=clock policy=gossip",
        "parameter_server ps downpour": "mode=clock policy=asgd",
        "elastic_averaging": "mode=clock policy=easgd",
        "hogwild_locked lock locking": "mode=race policy=locked",
        "lock_free lockfree": "mode=race policy=hogwild",
        # rules and attacks
        "aggregator aggregator_rule robust_aggregator robust aggregator_fn aggregator_method robust_rule rule "
        "aggregator_name": "aggregate.rule={}",
        "average averaging": "aggregate.rule=mean",
        "mkrum m_krum": "aggregate.rule=multi_krum",
        "comed cwmed coordinate_median coordinatewise_median coordinate_wise_median cm": "aggregate.rule=median",
        "geomed geometric gm rfa geometricmedian geo_median": "aggregate.rule=geometric_median",
        "cc clippedclustering": "aggregate.rule=centered_clipping",
        "min_diameter_averaging brute": "aggregate.rule=mda",
        "pre_aggregators preagg pre_aggregator_list nnm_list": """aggregate.rule='["nnm","median"]'""",
        "f": "attack.f={} for the number of attackers, or aggregate.f={} for the number that the rule tolerates",
        "byzantine byzantine_clients attack attack_clients": "attack.f={}",
        "byzantine_fraction byzantine_clients_fraction attack_fraction": "attack.fraction={}",
        "byzantine_list byzantine_clients_list byzantine_ids byzantine_id attack_clients_list": "attack.workers={}",
        "declared_byzantine tolerated_byzantine f_declared tolerated_f n_tolerated aggregate_byzantine aggregator_f "
        "tolerance": "aggregate.f={}",
        "honest honest_clients": (
            "workers=N is the number of all workers, honest or not; attack.f is the number of attackers"
        ),
        "attack_name attack_type attack_method attack_mode": "attack={}",
        "byzantine_attack": "attack={} or attack.f={}",
        "attack_start attack_from attack_round start_attack_round sleeper warmup_rounds_attack": (
            "attack.start_round={}"
        ),
        "signflip signflipping sf reverse_sign sign_flip": "attack=sign_flipping",
        "labelflip labelflipping lf label_flip": "attack=label_flipping",
        "gaussian_noise random_noise": "attack=gaussian",
        "noise": "privacy.noise={} for privacy, clock.noise={} for computing times, or attack=gaussian",
        "little a_little_is_enough lie alittleisenough": "attack=alie",
        "foe inner_product inner_product_manipulation innerproductmanipulation fall_of_empires": "attack=ipm",
        "optimal_alittleisenough optimal_alie": "attack=opt_alie",
        "optimal_innerproductmanipulation optimal_ipm": "attack=opt_ipm",
        "zero lazy": "attack=free_rider",
        "minmax": "attack=min_max",
        "minsum": "attack=min_sum",
        "trigger backdoor_trigger badnets": "attack=backdoor",
        # participation
        "client_selection client_sampling selection sampler sampling_strategy client_sampler selector "
        "sampling_method": "sampling={}",
        "client_dropout dropout_fraction client_dropout_fraction client_drop_fraction drop_fraction cdr "
        "failure_fraction client_failure": "sampling.client_dropout={}",
        # partition
        "split splitter partitioner data_distribution heterogeneity data_split partition_type partition_method "
        "partition_strategy distribution partitioning data_partition": "partition={}",
        "iid": "partition=iid, or partition=dirichlet partition.alpha=0.1 for label skew",
        "noniid non_iid niid lda hetero heterogeneous skew label_skew noniidness": (
            "partition=dirichlet partition.alpha=0.1"
        ),
        "alpha dirichlet dirichlet_alpha dirichlet_beta dir_alpha dirichlet_concentration concentration "
        "partition_alpha partition_beta dirichlet_param": "partition=dirichlet partition.alpha={}",
        "dir": "partition=dirichlet",
        "classes_client class_client labels_client partition_classes partition_labels": (
            "partition=classes_per_worker partition.k={}"
        ),
        "shards shards_client partition_shards": "partition=shards partition.s={}",
        "pathological pat sort_and_partition": "partition=shards",
        "homogeneous uniform_partition": "partition=iid",
        # data
        "dataset dataset_name data_name d": "data={}",
        "data_path data_root dataset_path dataset_root datadir root_path root": (
            "data.root={} for downloads, or data.path={} for files of your own"
        ),
        "train_file data_file csv_file csv_path": "data=csv data.path={}",
        "test_split test_fraction test_size validation validation_split holdout holdout_fraction "
        "validation_fraction validation_size": (
            "data.validation_fraction={} for validation samples, or data.local_test_fraction={} for tests of each "
            "worker"
        ),
        "augmentation transform data_augmentation aug": "data.augment={}",
        "pin_memory persistent_workers prefetch prefetch_factor dataloader drop_cache": (
            "samples are kept in memory on the device; there is no data loader to set"
        ),
        "image_size img_size": "data.size={}",
        "sep separator delimiter": "data.delimiter={}",
        "normalize normalise standardise": "data.standardize={}",
        "fashion fmnist fashionmnist fashion_mnist": "data=fashion_mnist",
        "cifar": "data=cifar10",
        "femnist celeba": "data=leaf data.path=FOLDER for the files of LEAF, or data=huggingface data.path=NAME",
        "imagenet tiny_imagenet tinyimagenet": "data=image_folder data.path=FOLDER data.size=224",
        # models
        "net network architecture arch backbone model_name model_type nn m model_arch": "model={}",
        "classes num_class output_dim": "model.classes={}",
        "in_channels input_channels": "model.channels={}",
        "input_dim in_features input_size": "model.inputs={}",
        "hidden_size hidden_dim hidden_units hidden_layers": "model=2nn model.hidden={}",
        "pretrained pretrained_weights init_weights initial_weights": "model.weights=FILE.safetensors",
        "dnn fc fully_connected": "model=mlp",
        "lenet lenet5 convnet conv simplecnn": "model=cnn or model=net",
        "softmax logreg logistic_regression lr_model mclr": "model=logistic",
        "linear_regression": "model=linear",
        "resnet": "model=resnet20, or model=torchvision:resnet18 for another ResNet of torchvision",
        "resnet18 resnet34 resnet50": "model=torchvision:resnet18 or another ResNet of torchvision",
        "vgg vgg11 vgg16 mobilenet mobilenet_v2 vit efficientnet": (
            "model=torchvision:vgg11 or another model of torchvision"
        ),
        "transformer gpt2 nanogpt": "model=gpt",
        "lstm charlstm": "model=char_lstm",
        "rnn gru bert": 'write your own model: model="package.module:Class"',
        "lora_rank lora_r": "model.lora.rank={}",
        "lora_alpha": "model.lora.alpha={}",
        # hardware and processes
        "accelerator dev device_type torch_device": "device={}",
        "gpu cuda no_cpu client_gpus on_gpu": "device=cuda",
        "gpu_id did device_id cuda_device cuda_id gpu_index": "device=cuda:{}",
        "cpu no_cuda no_gpu": "device=cpu, or processes={} for several cores",
        "devices": "device=cuda for one GPU; engine=distributed under torchrun uses several",
        "dtype": "precision={}",
        "amp mixed_precision autocast half float16 fp16 bfloat16 16_mixed bf16_mixed 16 bf16_true 16_true": (
            "precision=bf16"
        ),
        "fp32 32 32_true float full": "precision=float32",
        "fp64 double 64 64_true": "precision=float64",
        "processes nproc n_jobs j client_cpus cores procs": "processes={}",
        "threads": "threads_per_process={}",
        "client_resources backend_config ray_init_args": "processes={} or device=cuda",
        "backend simulation_backend": "engine={}, or distributed.backend={} for torch.distributed",
        "vmap vectorized vectorize stacked": "engine=batched",
        "multiprocess multiprocessing parallel ray joblib mp process fork forked": "engine=processes",
        "ddp torchrun fsdp deepspeed mpi nccl gloo": "engine=distributed under torchrun",
        "single sequential simulation one_process": "engine=serial",
        "rank local_rank node_rank master_addr master_port": (
            "the launcher sets it: torchrun --nproc-per-node=4 -m fedsim run engine=distributed"
        ),
        "compile torch_compile": "training steps are not compiled",
        "cudnn_benchmark benchmark deterministic": "the seed decides all draws; there is no such key",
        # clock and communication
        "async asynchronous async_mode": "mode=clock policy=fedbuff, or another of `fedsim list policies`",
        "buffer_size fedbuff_k buffer_k": "mode=clock policy=fedbuff policy.k={}",
        "staleness max_staleness staleness_bound bounded_staleness delay_bound": "mode=clock policy=ssp policy.s={}",
        "delay network_delay": "clock.latency={}",
        "speed device_speed client_speed speed_factor": "clock.slowdown={}",
        "stragglers straggler_fraction train_slow_fraction tsr slow_clients": (
            "mode=clock clock.slowdown=stragglers clock.slowdown.fraction={}"
        ),
        "compression": "processors={} or broadcast={}",
        "quantization bits quantize quantize_bits": """processors='[{name="qsgd",levels=16}]'""",
        "sparsification topk sparsity sparse topk_fraction compression_fraction": (
            """processors='[{name="top_k",ratio={}}]'"""
        ),
        "dp differential_privacy noise_multiplier dp_sigma dps epsilon target_epsilon dp_epsilon": (
            "privacy.mechanism=central privacy.clip=1.0 privacy.noise=1.0, or local.algorithm=dp_sgd; fedsim privacy "
            "--target-epsilon computes the noise"
        ),
        "target_delta dp_delta": "privacy.delta={}",
        "secure_aggregation secagg encryption he secure": "aggregate.secure=true",
        # tests, records and output
        "metric": "metrics={}",
        "accuracy acc metric_loss": "accuracy and loss are always recorded; omit it",
        "partition_random partition_equal": "partition=iid",
        "sampling_random": "sampling=uniform",
        "attack_random": "attack=gaussian",
        "server_fedavg server_sgdm": "server=sgd or server=momentum",
        "test_every evaluate_every validation_every validation_check_every check_val_every_n_epoch eg test_step "
        "evaluate_steps test_rounds evaluate_rounds test_every_round evaluate_every_round": (
            "the model is tested after every round; there is no such key"
        ),
        "target_accuracy target_acc goal_accuracy": (
            "stop.target={} to end a run there, or fedsim compare --target {} to report the time until then"
        ),
        "early_stopping early_stop auto_break earlystopping": "stop.patience=5 data.validation_fraction=0.1",
        "checkpoint_every save_every save_checkpoint_every checkpoint_steps save_steps": "checkpoint.every={}",
        "checkpoint": "checkpoint.every={}",
        "save_model save_checkpoint": "records.model={}",
        "tb": "records.tensorboard=true",
        "logger log_to report_to tracker": "records.loggers={}",
        "wandb wandb_project wandb_mode": "records.loggers=wandb",
        "out output output_path outdir out_path save_path log_path logdir results_path savedir default_root_dir sfn "
        "o save_folder_name experiment_path exp_path logging_path": "--out {}",
        "resume resume_from checkpoint_path load_from resume_from_checkpoint load_checkpoint restore load": (
            "--resume {}"
        ),
        "fedsim_compare_resume": "--out {}, which continues a comparison",
        "run_name exp_name experiment_name": "name={}",
        "save": "--out FOLDER to choose the output folder, or records.model=false to omit the model",
        "silent no_progress progress_bar": "--quiet",
        "verbose verbosity log_every log_every_n_steps print_every v log_level logging": (
            "each round prints one line; --quiet prints none"
        ),
        "config config_file config_path cfg conf": "write the file without a key or option: fedsim run CONFIG.toml",
        "override run_config": "write each setting as a word of its own: fedsim run rounds=3 workers=20",
        "callback on_round": "in Python, the argument on_round of fedsim.run is called after every round",
        # commands
        "fedsim_train fedsim_simulate fedsim_start fedsim_launch fedsim_fit fedsim_execute fedsim_experiment": (
            "fedsim run {}"
        ),
        "fedsim_sweep fedsim_grid fedsim_search fedsim_tune fedsim_benchmark fedsim_multirun": "fedsim compare {}",
        "fedsim_show fedsim_info fedsim_ls fedsim_describe": "fedsim list {}",
        "fedsim_check fedsim_env fedsim_test fedsim_diagnose": "fedsim doctor",
        "fedsim_list_settings fedsim_list_options fedsim_list_parameters fedsim_list_arguments": "fedsim list keys",
        "fedsim_list_losses": "fedsim list tasks",
        "fedsim_list_configs fedsim_list_examples fedsim_list_presets": "fedsim list experiments",
        "fedsim_init fedsim_create": "fedsim new {}",
        "fedsim_draw fedsim_figure fedsim_visualize": "fedsim plot {}",
    }
)
