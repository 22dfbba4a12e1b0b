"""What PFA, PFA+ and PDP-FL share: groups, directions, and the random control."""

import gc
import weakref

import pytest
import torch
from support.prescribed import MODEL, TRAINING, Prescribed, drawn

from polyeps.aggregation.subspace import Basis
from polyeps.algorithms import ALGORITHMS
from polyeps.algorithms._averaging import public_clients
from polyeps.algorithms._projection import combine, directions_of, kept_basis, received_basis
from polyeps.core import Profile
from polyeps.errors import InputError

ROWS = torch.randn(5, MODEL.size, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("rule", ["mixture", "k-means"])
def test_equal_budgets_make_everybody_public(rule: str) -> None:
    clients = [Profile(str(place), epsilon=0.7) for place in range(5)]
    assert public_clients(clients, rule) == set("01234")  # type: ignore[arg-type]
    assert public_clients(clients[:1], rule) == {"0"}  # type: ignore[arg-type]
    assert public_clients(clients, "threshold", 1.0) == set()
    assert len(public_clients(clients, "top", 0.4)) == 2


class Watched(Profile):
    """A profile that weak references can follow."""


def test_nothing_holds_on_to_profiles() -> None:
    client = Watched("a", epsilon=0.123)
    seen = weakref.ref(client)
    public_clients([client], "mixture")
    del client
    gc.collect()
    assert seen() is None


@pytest.mark.parametrize("kind", ["gaussian", "sparse"])
def test_random_directions_are_fresh_every_round_and_the_same_again(kind: str) -> None:
    directions = directions_of(TRAINING, 2, "set", True, kind)  # type: ignore[arg-type]

    def flat(basis: Basis | None) -> torch.Tensor:
        assert basis is not None
        return basis.to_tensors()["basis"]

    first = flat(directions(ROWS, [1.0] * 5, 0))
    assert torch.equal(first, flat(directions(2 * ROWS, [3.0] * 5, 0)))  # of data nobody holds
    assert not torch.equal(first, flat(directions(ROWS, [1.0] * 5, 1)))
    clients = Prescribed((0.5, 8.0, 0.6, 9.0), drawn())
    again = Prescribed((0.5, 8.0, 0.6, 9.0), drawn())
    build = ALGORITHMS["pfa"].build
    one = clients.run(build(TRAINING, projection=kind), 3).model
    assert torch.equal(one, again.run(build(TRAINING, projection=kind), 3).model)
    assert not torch.equal(one, again.run(build(TRAINING), 3).model)


def test_the_same_groups_in_any_order_and_listed_twice() -> None:
    directions = directions_of(TRAINING, 1, "set", True)
    weights = [1.0, 2.0, 3.0, 4.0, 5.0]
    once, _ = combine(ROWS, weights, [3, 1], directions, 0)
    twice, basis = combine(ROWS, weights, [1, 3, 1], directions, 0)
    assert torch.equal(once, twice)
    assert basis is not None
    received = received_basis(TRAINING, kept_basis(basis), True)
    torch.testing.assert_close(received.project(ROWS), basis.project(ROWS))
    assert kept_basis(None) == {}


def test_a_basis_for_another_model_is_refused() -> None:
    _, basis = combine(ROWS, [1.0] * 5, [0], directions_of(TRAINING, 1, "set", True), 0)
    with pytest.raises(InputError, match="ranks must be 1"):
        received_basis(TRAINING, kept_basis(basis), False)
