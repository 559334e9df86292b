"""Typical beginners' mistakes, and the one-line error for each of them."""

from __future__ import annotations

import pytest

ALLOWED = "allowed: "
QUICK = ["engine=serial", "model=logistic", "data=tests.components:tiny", "rounds=1"]

WORDS = [
    # keys under the names of other libraries
    ("roundz=3", 'roundz = 3: unknown key; did you mean "rounds"?'),
    ("wandb=true", "unknown key; write records.loggers=wandb"),
    ("nnm=true", """unknown key; write aggregate.rule='["nnm","mean"]'"""),
    ("pre_aggregators=nnm aggregate=median", """unknown key; write aggregate.rule='["nnm","median"]'"""),
    ("nnm=true aggregate.name=krum", """unknown key; write aggregate.rule='["nnm","krum"]'"""),
    (
        "num_workers=3",
        "write workers=3 for the simulated workers; samples are in memory, so no processes of a DataLoader",
    ),
    ("privacy.mechanism=central privacy.clip=1 privacy.noise=1 privacy.eps=3", "write privacy.target_epsilon=3"),
    (
        "partition.alpha=0.1",
        "unknown key (the partition strategy is iid); write partition=dirichlet partition.alpha=0.1",
    ),
    ("optimizer=adam", "write local.algorithm=adam or server=adam"),
    ("modle=2nn", 'unknown key; did you mean "model"?'),
    ("byzantine=2", "unknown key; write attack.f=2"),
    ("malicious_ratio=0.2", "unknown key; write attack.fraction=0.2"),
    ("f=2", "write attack.f=2 for the number of attackers, or aggregate.f=2 for the number that the rule tolerates"),
    ("epsilon=2", "write privacy.target_epsilon=2 with privacy.mechanism=central, or with local.algorithm=dp_sgd"),
    ("sampling.fraction=0.1", "write cohort=N, where N is the number of workers in each round"),
    ("partition.classes=20", "write partition=classes_per_worker partition.k=20"),
    ("strategy=FedAvg", "write aggregate.rule=weighted_mean local.algorithm=sgd server=sgd, which is the default"),
    ("strategy=FedProx", "unknown key; write local.algorithm=fedprox"),
    ("strategy.fraction_fit=0.1", "write cohort=N"),
    ("compression=top_k", "unknown key; write processors=top_k or downlink=top_k"),
    ("topk=0.1", """write processors='[{name="top_k",ratio=0.1}]'"""),
    ("async=true", "write mode=clock policy=fedbuff"),
    ("mu=0.01", "write local.algorithm=fedprox local.mu=0.01"),
    ("nu=1", "unknown key; it may be aggregate.nu of geometric_median"),
    ("K=100", "unknown key; write workers=100"),
    # words for tables, and words that systems use in two ways
    ("target=los", "write data.target=los for the column of targets in a table, or stop.target=los to end a run"),
    ("data.path=clean.csv", "write data=clean.csv for a file or folder of your own"),
    ("test_size=0.2", "write data.test_fraction=0.2 for a table without a test part, or data.local_test_fraction=0.2"),
    ("data.client=hospital", "write data.ids=hospital partition=natural for one worker per owner"),
    ("data.train=1000", "data.train = 1000: unknown key"),
    ("data.num_clients=10", "(the data set is mnist5k); write workers=10"),
    ("partition.column=hospital", "write data.ids=hospital partition=natural for one worker per owner"),
    ("partition.by=hospital", "write partition=natural partition.by=hospital for one worker per owner"),
    ("data=x.csv data.group_by=patient", "write data.split_by=patient"),
    ("data_format=channels_last", "write data.channels=last or data.channels=first"),
    ("train=1000", "data set with as many samples"),
    ("data.train=1000", "data set with as many samples"),
    ("cohort_size=10", "write cohort=10"),
    ("early_stopping_patience=3", "write stop.patience=3 data.validation_fraction=0.1"),
    ("restore_best_weights=true", "the saved model is that of the last round, not of the best"),
    ("image_data_format=channels_last", "write data.channels=last or data.channels=first"),
    ("data=x.csv data.decimal_separator=,", "write data.decimal=,"),
    ("label=FedAvg", "or --label OLD=NEW for a name in the table of fedsim compare"),
    ("partition=practical", "write partition=dirichlet partition.alpha=0.1"),
    ("partition=[dirichlet,0.1]".replace("dirichlet", '"dirichlet"'), "must be a name or a table"),
    ("aggregate={krum={f=1}}", "write aggregate.rule=krum; write attack.f=1"),
    ("nb_training_steps=10", "write rounds=10 sync=gradients for one gradient per worker and round"),
    ("data_distribution_seed=3", "write seed=3"),
    (
        "training_algorithm=DSGD",
        "write sync=gradients for distributed SGD, or mode=clock policy=d_psgd for decentralized",
    ),
    ("trainer.precision=bf16", "write precision=bf16"),
    ("scheduler.step_size=10", "write local.schedule=step local.schedule.step_size=10"),
    ("n_splits=5", "there is no cross-validation; fedsim compare seed=0,1,2 repeats a run with several seeds"),
    ("checkpoint.dir=ck", "write --resume ck to continue a run; checkpoints are written to its folder"),
    ("data=csv data.path=x.csv data.sep=;", "write data.delimiter=;"),
    ("aggregate=centered_clipping aggregate.clip=1", "or aggregate.rule=centered_clipping aggregate.tau=1"),
    ("local.workers=8", "workers is a top-level key"),
    # parameters of the chosen component, and values that its keys do not take
    ("model=mlp model.hidden_size=64", "(the model is mlp); write model.hidden=64"),
    (
        "privacy=central privacy.clip=1 privacy.noise=1 privacy.clipping_norm=1",
        "(the privacy mechanism is central); write privacy.clip=1",
    ),
    ("attack=alie attack.f=1 attack.count=1", "(the attack is alie); write attack.f=1"),
    ("local.algorithm=ditto local.mu=1", "mu is a parameter of fedprox, moon; ditto has dampening, lam, lr, "),
    ("local.algorithm=FedProto", "not part of fedsim; `fedsim list client-algorithms` shows those that are"),
    ("logger=csv", "every run writes its records to its folder; records.loggers adds tensorboard, wandb or mlflow"),
    ("devices=auto", "unknown key; write device=auto, the default"),
    ("aggregate=nnm+median", 'no such aggregation rule; write ["nnm","median"] (in single quotes in a shell)'),
    ("checkpoint=true", "checkpoint = true: must be a table; its keys are every, keep"),
    ("xyzzy=3", f"xyzzy = 3: unknown key; {ALLOWED}name, seed, rounds"),
    # names
    ("aggregate.rule=medain", 'no such aggregation rule; did you mean "median"?'),
    ("aggregate=fedbuff", "no such aggregation rule; write policy=fedbuff"),
    ("aggregate=mkrum", 'did you mean "multi_krum"?'),
    ("model=MLP", 'did you mean "mlp"?'),
    ("partition=dirichlet(0.1)", '"dirichlet(0.1)": write partition=dirichlet partition.alpha=0.1'),
    ("partition=dirichlet:0.1", '"dirichlet:0.1": write partition=dirichlet partition.alpha=0.1'),
    ("processors=top_k(0.1)", 'processors[0].name = "top_k(0.1)": write {name="top_k",ratio=0.1} (in single quotes'),
    ("local.schedule=cosine(10)", '"cosine(10)": write local.schedule=cosine local.schedule.T_max=10'),
    ("data=../nothere", "no such file or folder"),
    ("metrics=accuracy", "accuracy and loss are always recorded; omit it"),
    ("device=gpu", "no such device; write device=cuda"),
    ("partition=noniid", "no such partition strategy; write partition=dirichlet partition.alpha=0.1"),
    ("model=MyNet", f"{ALLOWED}2nn, 2nn_bn, char_lstm, cnn, gpt, linear, logistic, mlp, net, resnet20, resnet32, "),
    # keys written as command-line options
    ("--rounds 3", "--rounds: no such option; write rounds=3"),
    ("--lr=0.1", "--lr: no such option; write local.lr=0.1 or server.lr=0.1"),
    ("--dryrun", 'did you mean "--dry-run"?'),
    ("-v", "each round prints one line; --quiet prints none"),
    ("-y", f"{ALLOWED}--out, --resume"),
    ("-nc 20", "-nc: no such option; write workers=20"),
    ("--config x.toml", "--config: no such option; write the file alone: fedsim run x.toml"),
    # words that a shell splits or expands
    ("rounds 3", '"rounds 3": write rounds=3, without spaces'),
    ("rounds = 3", '"rounds = 3": write rounds=3, without spaces'),
    ("rounds", "expected key=value; write rounds=VALUE"),
    ("krum", "expected key=value; write aggregate.rule=krum"),
    ("attack.workers=[0, 1]", "put the word in quotes, as in 'attack.workers=[0, 1]'"),
    (
        "aggregate.rule=[nnm,median]",
        """put names in double quotes, and in a shell put the whole word in single quotes: '["nnm",""",
    ),
    ("model=net {local: {lr: 0.1}}", "put the word in quotes, as in '{local: {lr: 0.1}}'"),
    ('model={name="net"', "is not a valid TOML list or table"),
    (
        "seed=0, 1, 2",
        '"1,": expected key=value; write an experiment first, and several values as in fedsim compare seed=0,1,2',
    ),
    # values
    ("cohort=0.1", "must be a valid integer; write cohort=N, where N is the number of workers in each round"),
    ("rounds=2.5", "must be a valid integer; write a whole number, not a fraction"),
    ("cohort=all", "must be a valid integer; write cohort=N, where N is the number of workers in each round"),
    ("processors=8", "must be a list; write processes=8 for the number of processes, or processors=sign"),
    ("attack.workers=2", "must be a list; write attack.f=2 for the number of attackers, or attack.workers=[2]"),
    ("rounds=1e1", "must be a valid integer; write 10"),
    ("local.lr=0,1", "must be a valid number; write 0.1; for several values use fedsim compare"),
    ("local.lr=10%", "must be a valid number; write 0.1"),
    ("local.lr=1/4", "must be a valid number; write 0.25"),
    ("local.drop_last=yes", "must be true or false; write true"),
    ("cohort=None", "must be a valid integer; omit the key to leave it unset"),
    ("precision=16-mixed", '"tf32" or "bf16"; write precision=bf16'),
    ("seed=0..3", "must be a valid integer; with fedsim compare write 0,1,2,3"),
    ("mode=hogwild", "mode=race policy=hogwild"),
    ("aggregate.rule=nnm,median", 'for several values use fedsim compare; for a list write ["nnm","median"]'),
    ("data.augment=flip,shift", 'must be a list; write ["flip","shift"]'),
    # parameters behind the name, and spaces around the sign
    ("aggregate=krum,f=3", "write aggregate.rule=krum aggregate.f=3"),
    ("attack=sign_flipping,scale=3", "write attack=sign_flipping attack.scale=3"),
    ("processors=top_k,ratio=0.1", 'write [{name="top_k",ratio=0.1}]'),
    ("seed=1 rounds = 3", "write rounds=3, without spaces"),
    ("seed=1 rounds:3", "write rounds=3, without spaces"),
    # keys that belong to other components
    ("aggregate=multi_krum aggregate.k=3", "write aggregate.m=3"),
    ("aggregate=trimmed_mean aggregate.beta=0.1", "aggregate.f=N for the N values that are cut on each side"),
    ("server.optimizer=adamw", "write server=adam"),
    ("local.algorithm=dp_sgd local.noise_multiplier=1.2", "write local.noise=1.2"),
    ("lora=8", "write model.lora.rank=8"),
    # user-defined components
    ("model=./my_model.py:Net", "write my_model:Net (without slashes and .py)"),
    ("model=C:/x/my_model.py:Net", "write my_model:Net, and start fedsim in C:/x or add this folder to PYTHONPATH"),
    ("model=my_model.Net", "write my_model:Net (with a colon)"),
    ("aggregate=tests.components:misplaced", "fedsim does not pass the argument value, only updates, weights, gram,"),
    ("nothere.toml", "no such file"),
    ("a.toml b.toml", '"b.toml": expected key=value, because "a.toml" is already the experiment'),
    (".", "cannot be read: Is a directory"),
]

FILES = [
    ("[local]\nlr = 0.1\n[local]", "write each key and each [table] once"),
    ("local:\n  lr: 0.1", '(at line 1, column 6): "local:"; write key = value with'),
    ("rounds = 3\nmodel = 2nn  # small", '(at line 2, column 10): "model = 2nn  # small"; write key = value with text'),
    ("rounds = 3\nrounds = 4", 'Cannot overwrite a value (at end of document): "rounds = 4"'),
    ("[local]\nlr = 0.1\nworkers = 8", "workers is a top-level key; in a file write it above the first [table]"),
]


COMPARED = [
    ("local.lr=[0.1,0.2]", "local.lr has one value, a list; for several values write local.lr=0.1,0.2"),
    ("lr=[0.1,0.2]", 'for several values write local.lr=0.1,0.2, or in Python plan={"local.lr": [0.1, 0.2]}'),
    ("aggregate.rule=[mean,median]", "several values of fedsim compare: aggregate.rule=mean,median"),
    ("seed=0..3", "0..3 is not a number; write seed=0,1,2,3"),
    (
        "seed=0 1 2",
        '"1": expected key=value; write an experiment first, and several values as in fedsim compare seed=0,1,2',
    ),
    ("aggregate.rule=mean median", "several values as in fedsim compare aggregate.rule=mean,median"),
    ("server=sgd diloco", "write an experiment first, and several values as in fedsim compare server=sgd,diloco"),
    ("--resume cc", "--resume: no such option; write --out cc, which continues a comparison"),
    ("which_rule --format latex", "--format: no such option; write --table latex"),
    ("which_rule --table latex --quiet", "--table and --label: no table is printed with --quiet or --shard"),
    ("which_rule --table tex", '--table "tex": must be text, markdown, latex'),
    ("--jobs two", "error: fedsim compare: Invalid value for '--jobs'"),
    ("", "nothing to compare"),
]

FOLDERS = [
    ("--out afile", "afile: cannot be a run folder: File exists; a file with this name exists"),
    ("--out afile/run", "a file with this name exists; choose another folder with --out"),
    ("--resume x --out y", "omit --out"),
]


def line_of(done, code=2):
    assert done.exit_code == code, done.output
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    return line


@pytest.mark.parametrize(("words", "hint"), WORDS, ids=lambda value: value[:40])
def test_a_mistake_on_the_command_line_is_one_line_that_helps(cli, words, hint):
    line = line_of(cli("run", *words.split(), "--dry-run"))
    assert hint in line
    assert ALLOWED in hint or ALLOWED not in line, "the allowed values are listed only if there is no better hint"


@pytest.mark.parametrize(("text", "hint"), FILES, ids=lambda value: value[:40])
def test_a_mistake_in_a_file_is_one_line_that_helps(cli, tmp_path, text, hint):
    (tmp_path / "mine.toml").write_text(text)
    line = line_of(cli("run", "mine.toml", "--dry-run"))
    assert line.startswith("error: mine.toml: ")
    assert hint in line


@pytest.mark.parametrize(("words", "hint"), COMPARED)
def test_a_mistake_in_what_to_compare_is_one_line_that_helps(cli, words, hint):
    assert hint in line_of(cli("compare", *words.split(), "--dry-run"))


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("resume runs/x", "fedsim run --resume runs/x"),
        ("compar", 'did you mean "compare"?'),
        ("train rounds=3", "write fedsim run rounds=3"),
        ("list aggregators", 'did you mean "rules" or "pre-aggregators"?'),
        ("plot --metric loss", "error: fedsim plot: Missing argument 'FOLDER"),
        ("mnist_sync_sgd rounds=3", "fedsim run mnist_sync_sgd rounds=3"),
        ("rounds=3", "fedsim run rounds=3"),
        ("xyzxyz", f"{ALLOWED}run, compare"),
        ("show runs/x", "write fedsim list NAME for a component, or fedsim report FOLDER for a run"),
        ("plot x --ylim 0 1", "--ylim: no such option; write --y-range LOW HIGH"),
        ("plot x --wdith 3", '--wdith: no such option; did you mean "--width"?'),
        ("doctor --fix", f"--fix: no such option; {ALLOWED}--help"),
        ("--list", "--list: no such option; write fedsim list"),
    ],
)
def test_a_word_that_is_not_a_command_is_one_line_that_helps(cli, words, hint):
    assert hint in line_of(cli(*words.split()))


@pytest.mark.parametrize(("words", "hint"), FOLDERS)
def test_a_mistake_in_a_folder_is_one_line_that_helps(cli, tmp_path, words, hint):
    (tmp_path / "afile").write_text("")
    assert hint in line_of(cli("run", *QUICK, *words.split()))
