import pytest
import torch

from fedsim.aggregation import Gram
from fedsim.rounds.update_steps import AttackedRows


@pytest.mark.parametrize("shape", [(3, 40), (40,)])
@pytest.mark.parametrize("honest", [[4], [0, 2, 4, 5, 6, 8]])
def test_the_gram_of_attacked_rows_is_that_of_the_cohort(honest, shape):
    cohort = sorted([*honest, 1, 3, 7])
    attackers = [slot not in honest for slot in cohort]
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(9, 40, generator=generator) + 5
    attacked = AttackedRows(rows, torch.tensor(honest), attackers)
    assert torch.equal(attacked.honest, rows[honest])
    for _ in range(2):
        byzantine = torch.randn(shape, generator=generator)
        rows[[1, 3, 7]] = byzantine
        gram, expected = attacked.gram(byzantine), Gram(rows[cohort])
        for name in ("products", "squared_distances"):
            assert torch.allclose(getattr(gram, name), getattr(expected, name), rtol=1e-12, atol=1e-12), name
