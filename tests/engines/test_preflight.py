from __future__ import annotations

import torch

from fedsim.data.digests import digest
from fedsim.engines.preflight import difference_of

REMEDY = "; for separate runs, name another engine, such as engine=serial"


def test_a_difference_is_reported_in_one_line_with_rank_and_both_values():
    same = {"versions": {"torch": "2.6"}, "the experiment": {"rounds": 3, "local.lr": 0.1}}
    assert difference_of([same, same, same]) == []
    changed = {**same, "the experiment": {"rounds": 3, "local.lr": 0.2}}
    line = f"the ranks differ in the experiment: local.lr = 0.1 on rank 0 and 0.2 on rank 2{REMEDY}"
    assert difference_of([same, same, changed]) == [line]
    missing = {**same, "versions": {}}
    assert difference_of([same, missing]) == [
        'the ranks differ in versions: torch = "2.6" on rank 0 and not set on rank 1'
    ]


def test_of_many_differences_the_first_ones_are_reported():
    claims = [{"the experiment": dict.fromkeys("abcde", value)} for value in (1, 2)]
    assert difference_of(claims)[0].endswith(f"c = 1 on rank 0 and 2 on rank 1 (and 2 more){REMEDY}")


def test_a_hash_goes_by_values_shape_and_dtype():
    values = torch.arange(6.0)
    assert digest(values) == digest(values.clone())
    others = [values + 1, values.view(2, 3), values.double(), values.int()]
    assert len({digest(values), *map(digest, others)}) == 5
    assert digest(torch.zeros(3, 2).t()) == digest(torch.zeros(2, 3))
    assert digest(torch.zeros(3, dtype=torch.bfloat16)) != digest(torch.zeros(3))


def test_of_a_large_tensor_every_kth_row_is_hashed():
    values = torch.arange(400.0).reshape(100, 4)
    changed = {row: values.clone().index_fill_(0, torch.tensor([row]), -1) for row in range(100)}
    seen = [row for row, other in changed.items() if digest(other, 800) != digest(values, 800)]
    assert seen == [*range(0, 100, 2)]
    assert len({digest(other, 1600) for other in changed.values()}) == 100
    assert digest(values, 800) != digest(values[:99], 800)
