"""How summaries are packed to go out."""

from types import SimpleNamespace

import pytest
import torch

from deltaspan.exchange.compose import by_owners, join_pairs, split_pairs
from deltaspan.plan import head_ranges


@pytest.mark.parametrize("n", [0, 1, 3])
@pytest.mark.parametrize(("HV", "owners"), [(6, 1), (6, 3), (5, 2), (7, 3), (3, 5), (1, 4)])
def test_rows_are_by_owners_then_fragments_then_heads(rng: torch.Generator, n: int, HV: int, owners: int) -> None:
    """Of tiles that lie between others, too."""
    one, other = (torch.randn(n, HV, 9, generator=rng)[..., :width] for width in (4, 3))
    both = torch.cat([one, other], -1)
    blocks = [both[:, heads.start : heads.stop].flatten(0, 1) for heads in head_ranges(HV, owners)]
    assert torch.equal(by_owners(owners, one, other), torch.cat(blocks))


def test_what_nothing_enters_has_zeros_for_a_map(rng: torch.Generator) -> None:
    M, b = torch.randn(2, 4, 3, 3, generator=rng), torch.randn(3, 4, 3, 2, generator=rng)
    seams = SimpleNamespace(own_through=torch.tensor([0, 2]))
    rows = join_pairs(M, b, seams, 2).view(2, 3, 2, 15).transpose(0, 1).flatten(1, 2)  # owners, fragments, heads
    maps, offsets = split_pairs(rows, b)
    assert torch.equal(offsets, b) and torch.equal(maps[[0, 2]], M) and not maps[1].any()
