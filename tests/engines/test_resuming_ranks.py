"""Ranks that are started again go on from the newest checkpoint, each with its part of it."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from tests.commands import ROOT, ended, start_python, start_ranks

WORDS = (
    *("run_experiment.py", "tiny.toml", "engine=distributed", "rounds=5", "checkpoint.every=1", "server=adam"),
    *("distributed.timeout=20", "aggregate.rule=foolsgold", "data=tests.plugs:tiny", "workers=4"),
    "local.batch_size=16",
)


def ranks(count, program, *words, cwd):
    """A group of ranks, to its end: what all wrote to stdout and to stderr."""
    (cwd / "tiny.toml").write_text('name = "tiny"\n')
    codes, outs, errors = ended(start_ranks(count, ROOT / program, *words, cwd=cwd), 150)
    assert codes == [0] * count, errors
    return "".join(outs), "".join(errors)


def torchrun(count, program, *words, cwd, restarts):
    """The same under PyTorch's launcher."""
    (cwd / "tiny.toml").write_text('name = "tiny"\n')
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count))
    options = ("--max-restarts", str(restarts), str(ROOT / program))
    process = start_python(*launcher, *options, *words, cwd=cwd, OMP_NUM_THREADS="1")
    out, errors = process.communicate(timeout=150)
    assert process.returncode == 0, errors
    return out, errors


def model_of(folder):
    return torch.cat([tensor.flatten() for tensor in load_file(folder / "model.safetensors").values()])


@pytest.mark.slow
def test_under_max_restarts_a_run_whose_rank_was_killed_ends_as_if_it_had_not_been(tmp_path):
    fails = ("model=tests.plugs:FailsInRankOnce", "model.how=kill", "model.after=20")
    out, errors = torchrun(2, *WORDS, *fails, "--resume", "run", cwd=tmp_path, restarts=1)
    assert "ended without a word" in errors
    assert "continuing after round 2 of 5" in out
    ranks(2, *WORDS, *fails, "model.rank=9", "--resume", "whole", cwd=tmp_path)
    assert torch.equal(model_of(tmp_path / "run"), model_of(tmp_path / "whole"))


def test_ranks_that_were_killed_after_the_last_round_end_well_when_they_are_started_again(tmp_path):
    """All rounds are on record then, by the first rank."""
    for _ in range(2):
        out, _ = ranks(2, *WORDS, "model=logistic", "--resume", "run", cwd=tmp_path)
    assert "after 5 rounds, 0 of them in this session" in out


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["weighted_mean", "median", "krum", "foolsgold"])
def test_another_number_of_ranks_goes_on_to_the_same_numbers(rule, tmp_path):
    words = (*WORDS, f"aggregate.rule={rule}", "precision=float64", "model=logistic")
    ranks(3, *words, "rounds=3", "--resume", "run", cwd=tmp_path)
    ranks(2, *words, "--resume", "run", cwd=tmp_path)
    ranks(1, *words, "--resume", "whole", cwd=tmp_path)
    assert torch.allclose(model_of(tmp_path / "run"), model_of(tmp_path / "whole"), rtol=0, atol=1e-9)


@pytest.fixture(scope="module")
def compressed(tmp_path_factory):
    """Runs whose gradients travel compressed, gone on with or not; see resuming_program.py. And what went to stderr."""
    folder = tmp_path_factory.mktemp("compressed")
    program = "tests/engines/resuming_program.py"
    ranks(3, program, str(folder), cwd=folder)
    return folder, ranks(2, program, str(folder), cwd=folder)[1]


def checkpoint_of(folder, round):
    return load_file(folder / "checkpoints" / f"round-{round:05d}.safetensors")


@pytest.mark.parametrize("start", ["warm", "cold", "late"])
def test_what_compression_has_left_over_is_gone_on_with_to_the_bit(start, compressed):
    folder, _ = compressed
    assert torch.equal(model_of(folder / start), model_of(folder / f"{start}-whole"))
    one, other = (checkpoint_of(folder / name, 5) for name in (start, f"{start}-whole"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    errors = [one[f"hook.rank{rank}.error.0"] for rank in (0, 1)]
    assert all(error.any() for error in errors)
    assert not torch.equal(*errors)
    assert ("hook.all.q.0" in one) == (start != "cold")


def test_after_the_last_round_of_gradients_nothing_of_the_size_of_rows_is_kept_for_a_hook(compressed):
    folder, _ = compressed
    assert torch.equal(model_of(folder / "post_local"), model_of(folder / "post_local-whole"))
    ranks_kept = [any(name.startswith("hook.rank") for name in checkpoint_of(folder / "post_local", n)) for n in (1, 2)]
    assert ranks_kept == [True, False]


def test_another_number_of_ranks_begins_without_what_compression_has_left_over_and_says_so(compressed):
    folder, said = compressed
    line = "ran on 3 ranks before, and now on 2: the state that each rank kept for itself starts again"
    assert said.count(line) == 1
    assert said.count("FedsimWarning: the communication hook ran") == 1, "of no other run"
    before, after = (checkpoint_of(folder / "three", round) for round in (2, 3))
    assert [name for name in before if "error" in name] == [f"hook.rank{rank}.error.0" for rank in (0, 1, 2)]
    assert [name for name in after if "error" in name] == [f"hook.rank{rank}.error.0" for rank in (0, 1)]
    assert after["hook.all.steps"] > before["hook.all.steps"] > 3
    assert len((folder / "three" / "metrics.jsonl").read_text().splitlines()) == 3


def test_a_hook_that_does_not_say_what_it_keeps_begins_anew_and_says_so(compressed):
    folder, said = compressed
    assert said.count("FedsimWarning: the communication hook starts again: its state is in no checkpoint") == 1
    assert len((folder / "shrunk" / "metrics.jsonl").read_text().splitlines()) == 2


def test_what_does_not_fit_one_rank_is_refused_by_all(compressed):
    folder, said = compressed
    refused = "does not fit this run: RecordError: communication hook: "
    assert said.count(refused) == 2
    assert f"checkpoint of round 4: {refused}RecordError: lacks the tensor error.0; round 3 is tried instead" in said
    assert f"checkpoint of round 3: {refused}rank 1 has no part in it; round 2 is tried instead" in said
    assert torch.equal(model_of(folder / "refused"), model_of(folder / "warm-whole"))
