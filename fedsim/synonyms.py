"""Names that other libraries and papers use for keys and components of an experiment, for hints in error messages.

`fedsim.core.suggestions` looks up names in lower case with underscores.
"""

from __future__ import annotations

from typing import TypeVar

Meaning = TypeVar("Meaning")


def _split_words(table: dict[str, Meaning]) -> dict[str, Meaning]:
    """Return a dict with a separate entry for each name in a key: {"a b": x} becomes {"a": x, "b": x}."""
    return {word: meaning for words, meaning in table.items() for word in words.split()}


# Synonyms of keys, each with the dotted keys that it may mean.
KEYS: dict[str, tuple[str, ...]] = _split_words(
    {
        "clients num_clients n_clients nb_clients number_of_clients total_clients client_num "
        "num_workers n_workers nb_workers nodes num_nodes users num_users participants parties agents "
        "world_size num_supernodes nb_honest n": ("workers",),
        "clients_per_round num_clients_per_round users_per_round workers_per_round cohort_size": ("cohort",),
        "num_rounds n_rounds nb_rounds num_server_rounds communication_rounds comm_rounds "
        "global_rounds global_epochs iterations num_iterations iters nb_steps max_rounds": ("rounds",),
        "max_epochs": ("rounds", "local.epochs"),
        "e num_epochs n_epochs local_epochs epoch client_epochs": ("local.epochs",),
        "accumulate grad_accumulation gradient_accumulation gradient_accumulation_steps accumulate_grad_batches": (
            "local.accumulation_steps",
        ),
        "train trainable_parameters": ("local.trainable",),
        "max_rows": ("batched.max_workers",),
        "num_steps local_steps local_iterations local_updates max_steps": ("local.steps",),
        "bs batch batchsize minibatch minibatch_size local_batch_size client_batch_size train_batch_size local_bs": (
            "local.batch_size",
        ),
        "learning_rate learningrate step_size stepsize eta": ("local.lr", "server.lr"),
        "local_lr client_lr client_learning_rate local_learning_rate": ("local.lr",),
        "grad_clip max_grad_norm clip_grad_norm gradient_clipping": ("local.clip_norm",),
        "scheduler lr_scheduler lr_schedule": ("local.schedule.name", "server.schedule.name"),
        "warmup warmup_rounds": ("local.schedule.warmup", "server.schedule.warmup"),
        "server_lr global_lr server_learning_rate": ("server.lr",),
        "optimizer optimiser optim opt solver": ("local.algorithm", "server.name"),
        "local_optimizer client_optimizer": ("local.algorithm",),
        "lambda lamda lambda_ lambd reg_lambda": ("local.lam",),
        "wd l2 l2_reg weight_decay_rate": ("local.weight_decay",),
        "aggregator aggregation aggregation_rule agg gar defense defence robust_aggregator": ("aggregate.rule",),
        "algorithm fl_algorithm method": ("aggregate.rule", "local.algorithm", "policy.name"),
        "strategy": ("aggregate.rule", "partition.name", "sampling.name"),
        "client_selection client_sampling selection sampler sampling_strategy": ("sampling.name",),
        "dropout_rate worker_dropout failure_rate drop_prob": ("sampling.client_dropout",),
        "byzantine_fraction malicious_fraction attack_fraction attacker_ratio byz_ratio": ("attack.fraction",),
        "attack_name attack_type byzantine_attack": ("attack.name",),
        "f_declared declared_f tolerated_f n_tolerated": ("aggregate.f",),
        "sleeper attack_start attack_start_round attack_from warmup_rounds_attack": ("attack.start_round",),
        "tolerance num_tolerated nb_declared_byz": ("aggregate.f",),
        "split splitter partitioner data_distribution heterogeneity data_split": ("partition.name",),
        "dirichlet_alpha dirichlet_beta dir_alpha": ("partition.alpha",),
        "data_dir data_path datadir data_folder root_dir": ("data.root",),
        "dataset dataset_name datasets": ("data.name",),
        "validation validation_split val_split val_fraction valid_ratio holdout": ("data.validation_fraction",),
        "augmentation augmentations transform transforms": ("data.augment",),
        "net network architecture arch backbone model_name": ("model.name",),
        "num_classes n_classes": ("model.classes",),
        "image_size img_size": ("data.size",),
        "sep separator": ("data.delimiter",),
        "normalize normalise standardise scale": ("data.standardize",),
        "random_seed random_state manual_seed rng_seed": ("seed",),
        "num_processes n_processes nproc n_jobs num_cpus cores": ("processes",),
        "threads num_threads n_threads": ("threads_per_process",),
        "dtype amp mixed_precision autocast": ("precision",),
        "save_every save_interval checkpoint_every checkpoint_interval": ("checkpoint.every",),
        "save_model": ("records.model",),
        "tb use_tensorboard": ("records.tensorboard",),
        "delay delays network_delay": ("clock.latency",),
        "speed speeds": ("clock.slowdown.name",),
    }
)

# Synonyms of component names, each with the names that it may mean. A hint only uses names of the kind of component
# that the key expects.
NAMES: dict[str, tuple[str, ...]] = _split_words(
    {
        "fedavg federated_averaging": ("weighted_mean", "sync", "sgd"),
        "accuracy acc test_acc": ("test_accuracy",),
        "loss": ("test_loss", "train_loss"),
        "to_pandas to_df dataframe df": ("to_dataframe",),
        "personal_accuracy personalized_accuracy local_accuracy local_test_accuracy client_accuracy": (
            "worker_accuracy",
        ),
        "avg average averaging": ("mean",),
        "comed cwmed coordinate_median coordinatewise_median": ("median",),
        "geomed geometric gm rfa": ("geometric_median",),
        "tm trmean cwtm": ("trimmed_mean",),
        "cc clipping": ("centered_clipping", "norm_clipping"),
        "mlp dnn fc": ("2nn",),
        "lenet lenet5 convnet conv": ("cnn", "net"),
        "linear softmax logreg logistic_regression": ("logistic",),
        "lda noniid non_iid niid dir hetero heterogeneous": ("dirichlet",),
        "pathological sort_and_partition": ("shards",),
        "random uniform homogeneous": ("iid", "gaussian"),
        "sam sharpness_aware": ("fedsam",),
        "mime_lite": ("mimelite",),
        "perfedavg fomaml maml": ("per_fedavg",),
        "bce logits binary_cross_entropy": ("binary",),
        "ce nll nll_loss crossentropy": ("classification",),
        "mse_loss": ("mse",),
        "fashion fmnist fashionmnist": ("fashion_mnist",),
        "signflip signflipping sf reverse_sign": ("sign_flipping",),
        "labelflip labelflipping lf": ("label_flipping",),
        "noise random_noise": ("gaussian",),
        "little a_little_is_enough lie": ("alie",),
        "foe inner_product inner_product_manipulation": ("ipm",),
        "zero zeros lazy": ("free_rider",),
        "vmap vectorized": ("batched",),
        "multiprocess multiprocessing parallel fork forked ray": ("processes",),
        "ddp torchrun": ("distributed",),
        "single sequential": ("serial",),
        "async asynchronous fedasgd": ("asgd", "fedasync"),
    }
)

# Words that fedsim expresses differently or does not support, each with the hint that error messages show.
NOTES: dict[str, str] = _split_words(
    {
        "gpu gpus cuda use_cuda use_gpu num_gpus accelerator devices": "write device=cuda",
        "cpu use_cpu no_cuda": "write device=cpu",
        "half float16": "write precision=bf16",
        "fp16": "write precision=bf16, or distributed.hook=fp16 for gradients that ranks send",
        "bfloat16": "write precision=bf16",
        "iid is_iid": "write partition=iid, or partition=dirichlet partition.alpha=0.1",
        "noniid non_iid niid": "write partition=dirichlet partition.alpha=0.1",
        "fraction_fit fraction_train client_fraction sample_fraction participation frac "
        "participation_rate client_rate": "write cohort=N, where N is a number of workers",
        "byzantine num_byzantine n_byzantine nb_byz nb_byzantine byz n_byz byzantines byzantine_workers "
        "malicious num_malicious malicious_clients attackers num_attackers adversaries "
        "num_adversaries": "write attack.fraction=0.2 or attack.workers=[0,1]; aggregate.f is what the rule tolerates",
        "pre_aggregators pre_aggregator preagg pre_agg": 'write aggregate.rule=["nnm","median"]',
        "fedprox proximal_mu": "write local.algorithm=fedprox local.mu=0.01",
        "fedsgd": "write sync=gradients",
        "fedadam": "write server=adam",
        "fedyogi": "write server=yogi",
        "fedadagrad": "write server=adagrad",
        "fedavgm": "write server=momentum",
        "async_mode is_async": "write mode=clock policy=fedbuff",
        "out output output_dir outdir out_dir save_dir save_path log_dir logdir results_dir": "write --out FOLDER",
        "resume resume_from ckpt checkpoint_path load_from": "write --resume FOLDER",
        "save": "write --out FOLDER to choose the output folder, or records.model=false to omit the model",
        "quiet silent": "write --quiet",
        "verbose log_every log_interval print_every": "each round prints one line; write --quiet to print none",
        "target_accuracy": (
            "write stop.target=0.97 to end a run there, or fedsim compare --target 0.97 to report the time until then"
        ),
        "early_stopping early_stop": "write stop.patience=5 data.validation_fraction=0.1",
        "test_every eval_every eval_interval eval_freq test_interval test_freq evaluate_every "
        "test_step": "the model is always tested after every round; there is no such key",
        "cosine lr_step": "write local.schedule=cosine; fedsim list schedules shows all schedules",
        "clip": """write local.clip_norm=1.0 for gradients, or processors='[{name="clip",max_norm=1.0}]' for updates""",
        "dp differential_privacy noise_multiplier target_epsilon": (
            "write privacy.mechanism=central privacy.clip=1.0 privacy.noise=1.0, or local.algorithm=dp_sgd; "
            "fedsim privacy --target-epsilon computes the noise"
        ),
        "secure_aggregation secagg encryption": "write aggregate.secure=true",
        "compression compressor quantization sparsification": (
            """write processors='["sign"]' or broadcast='["sign"]', or another of `fedsim list processors`"""
        ),
        "loss criterion loss_fn loss_function": (
            "the loss belongs to the task: task=binary, or a loss such as task=torch.nn.functional:mse_loss"
        ),
        "use_wandb": """write records.loggers='["wandb"]'""",
        "l1 l1_loss mae_loss": "write task=regression task.loss=l1",
        "huber huber_loss smooth_l1": "write task=regression task.loss=huber",
        "metric": """write metrics='["top_k"]', or others of `fedsim list metrics`""",
        "shuffle": "samples are always shuffled in every epoch; there is no such key",
        "compile torch_compile": "training steps are not compiled",
        "config config_file": "write the file without a key: fedsim run CONFIG.toml",
        "callback callbacks on_round": "in Python, fedsim.run(..., on_round=f) calls f after every round",
        "femnist celeba": "write data=leaf data.path=FOLDER for the files of LEAF, or data=huggingface data.path=NAME",
        "imagenet": "write data=image_folder data.path=FOLDER data.size=224",
        "resnet": "write model=resnet20, or model=torchvision:resnet18 for another ResNet of torchvision",
        "resnet18 resnet34 resnet50": "write model=torchvision:resnet18 or another ResNet of torchvision",
        "vgg vgg11 vgg16 mobilenet vit": "write model=torchvision:vgg11 or another model of torchvision",
        "transformer": "write model=gpt",
        "lstm": "write model=char_lstm",
        "rnn gru bert": 'write your own model: model="package.module:Class"',
    }
)
