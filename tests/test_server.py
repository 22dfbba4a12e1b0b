"""The server's loop: whose turn it is, who declined, when to stop, and what it must be told."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polyeps.core import Action, Algorithm, Ask, Payload, Profile, Replies, Spec, State, Task
from polyeps.errors import InputError, TaskRefused
from polyeps.participation import Participation, cohort_size
from polyeps.server import Round, Transport, check_disclosure, serve

EVERYONE = tuple(f"c{number}" for number in range(20))


class Town(Transport):
    """Clients that can afford so many rounds each, and reply with a one."""

    def __init__(self, purses: Mapping[str, int], silent: frozenset[str] = frozenset()) -> None:
        self.purses, self.silent = dict(purses), silent
        self.tasks: list[Task] = []

    def profiles(self) -> tuple[Profile, ...]:
        return tuple(Profile(client, ready=purse > 0) for client, purse in self.purses.items())

    def __call__(self, task: Task) -> Replies:
        self.tasks.append(task)
        ids = tuple(client for client in task.to if self.purses[client] > 0 and client not in self.silent)
        for client in ids:
            self.purses[client] -= 1
        return Replies(ids, {"one": torch.ones(len(ids))}, tuple(self.purses[client] > 0 for client in ids), 10, 3)


def _round(state: State, ask: Ask) -> State:
    replies = ask(Task("greet", tuple(face.id for face in state.roster), {}))
    return replace(state, model=state.model + len(replies.ids))


GREETING = Algorithm({"greet": Action(lambda _: ({}, {}), None)}, _round)


def watch(town: Town, rounds: int, participation: Participation | None = None, **more: object) -> list[Round]:
    seen: list[Round] = []
    serve(
        GREETING,
        town,
        State(torch.zeros(1)),
        rounds=rounds,
        participation=participation or Participation(),
        seed=1,
        observe=lambda round, _: seen.append(round),
        **more,  # type: ignore[arg-type]
    )
    return seen


# who takes part


@pytest.mark.parametrize(
    ("share", "clients", "size"), [(0.8, 50, 40), (0.1, 24, 2), (0.01, 5, 1), (1.0, 7, 7), (0.29, 100, 29)]
)
def test_a_share_is_rounded_down_but_never_to_nobody(share: float, clients: int, size: int) -> None:
    assert cohort_size(share, clients) == size


@given(st.permutations(EVERYONE), st.integers(0, 50))
def test_lots_do_not_depend_on_the_order_of_clients(order: list[str], round: int) -> None:
    for kind in ("uniform", "poisson"):
        some = Participation(kind, 0.4)
        assert set(some.draw(order, order, 3, round)) == set(some.draw(EVERYONE, EVERYONE, 3, round))


def test_everybody_is_drawn_equally_often() -> None:
    some = Participation("uniform", 0.25)
    drawn = [some.draw(EVERYONE, EVERYONE, 1, round) for round in range(2000)]
    assert {len(cohort) for cohort in drawn} == {5}
    for client in EVERYONE:
        assert abs(sum(client in cohort for cohort in drawn) - 500) < 6 * (2000 * 0.25 * 0.75) ** 0.5
    assert some.draw(EVERYONE, EVERYONE, 2, 0) != drawn[0]


@given(st.sets(st.sampled_from(EVERYONE)), st.integers(0, 20))
def test_who_leaves_changes_nobody_elses_lot(gone: set[str], round: int) -> None:
    left = [client for client in EVERYONE if client not in gone]
    coins = Participation("poisson", 0.5)
    assert set(coins.draw(EVERYONE, left, 1, round)) == set(coins.draw(EVERYONE, EVERYONE, 1, round)) - gone
    some = Participation("uniform", 0.5)
    full, rest = set(some.draw(EVERYONE, EVERYONE, 1, round)), set(some.draw(EVERYONE, left, 1, round))
    assert full - gone <= rest  # whoever was drawn and is left is drawn still
    assert len(rest) == min(10, len(left))


def test_poisson_cohorts_differ_in_size_and_full_ones_hold_everybody() -> None:
    coins = Participation("poisson", 0.5)
    sizes = {len(coins.draw(EVERYONE, EVERYONE, 1, round)) for round in range(50)}
    assert len(sizes) > 3
    assert Participation("full", 0.1).draw(EVERYONE, EVERYONE[3:], 1, 0) == EVERYONE[3:]


@given(st.integers(0, 200), st.sampled_from(["uniform", "poisson"]))
def test_one_of_those_wanted_is_always_there_while_one_is_left(round: int, kind: str) -> None:
    plain = Participation(kind, 0.1)  # type: ignore[arg-type]
    wanted = replace(plain, including=frozenset(EVERYONE[:3]))
    without, cohort = set(plain.draw(EVERYONE, EVERYONE, 1, round)), set(wanted.draw(EVERYONE, EVERYONE, 1, round))
    assert cohort & wanted.including
    if without & wanted.including:
        assert cohort == without
    elif kind == "uniform":
        assert len(cohort) == len(without)
    assert set(wanted.draw(EVERYONE, EVERYONE[3:], 1, round)) == set(plain.draw(EVERYONE, EVERYONE[3:], 1, round))


@pytest.mark.parametrize(("share", "quorum"), [(0.0, 1), (1.1, 1), (0.5, 0), (float("nan"), 1)])
def test_impossible_participation_is_refused(share: float, quorum: int) -> None:
    with pytest.raises(InputError, match=r"participation\.(share|quorum) must be"):
        Participation("uniform", share, quorum)


# rounds


def test_rounds_count_answers_declines_and_bytes() -> None:
    town = Town({"a": 2, "b": 1, "c": 5}, silent=frozenset("c"))
    first, second = watch(town, 5)[:2]
    assert (first.number, first.invited, first.declined, first.active) == (0, ("a", "b", "c"), ("c",), ("a", "c"))
    assert first.traffic == {"a": (10, 3), "b": (10, 3)}
    assert (second.invited, second.active) == (("a", "c"), ("c",))
    assert [(task.run, task.round) for task in town.tasks[:2]] == [("", 0), ("", 1)]


def test_who_was_not_ready_at_first_is_never_asked() -> None:
    town = Town({"a": 3, "b": 0})
    assert [round.invited for round in watch(town, 2)] == [("a",), ("a",)]


def test_a_run_ends_when_fewer_than_the_quorum_are_left() -> None:
    purses = {"a": 1, "b": 2, "c": 3, "d": 9}
    lengths = {quorum: len(watch(Town(purses), 8, Participation(quorum=quorum))) for quorum in (1, 2, 3, 4)}
    assert lengths == {1: 8, 2: 3, 3: 2, 4: 1}


def test_a_resumed_run_goes_on_with_those_who_were_left() -> None:
    seen: list[Round] = []
    state = serve(
        GREETING,
        Town(dict.fromkeys("abc", 9)),
        State(torch.zeros(1), round=3),
        rounds=5,
        participation=Participation(),
        seed=1,
        active=("c", "a"),
        observe=lambda round, _: seen.append(round),
    )
    assert [(round.number, round.invited) for round in seen] == [(3, ("c", "a")), (4, ("c", "a"))]
    assert (state.round, float(state.model)) == (5, 4.0)


def test_one_missed_message_does_not_end_a_clients_part() -> None:
    class Forgetful(Town):
        def __call__(self, task: Task) -> Replies:
            self.silent = frozenset("b") if task.round == 1 else frozenset()
            return super().__call__(task)

    rounds = watch(Forgetful(dict.fromkeys("abc", 9)), 3)
    assert [set(round.traffic) for round in rounds] == [set("abc"), set("ac"), set("abc")]
    assert [round.declined for round in rounds] == [(), ("b",), ()]


def test_who_says_it_cannot_afford_more_has_left() -> None:
    class Honest(Town):
        def __call__(self, task: Task) -> Replies:
            poor = tuple(client for client in task.to if self.purses[client] <= 0)
            return replace(super().__call__(task), exhausted=poor)

    town = Honest({"a": 3, "b": 9})
    town.profiles = lambda: (Profile("a"), Profile("b"))  # type: ignore[method-assign]
    town.purses["a"] = 0
    assert [round.active for round in watch(town, 2)] == [("b",), ("b",)]


def test_clients_that_join_late_take_part() -> None:
    class Growing(Town):
        def newcomers(self) -> tuple[Profile, ...]:
            number = len(self.tasks)
            if number == 1:
                self.purses |= {"c": 9, "d": 9, "e": 0}
                return (Profile("c", epsilon=2.0), Profile("d"), Profile("e", epsilon=1.0, ready=False))
            return ()

    seen: list[Round] = []
    needy = replace(GREETING, needs=("epsilon",))
    town = Growing(dict.fromkeys("ab", 9))
    town.profiles = lambda: (Profile("a", epsilon=1.0), Profile("b", epsilon=1.0))  # type: ignore[method-assign]
    state = serve(
        needy,
        town,
        State(torch.zeros(1)),
        rounds=3,
        participation=Participation(),
        seed=1,
        observe=lambda round, _: seen.append(round),
    )
    assert [round.invited for round in seen] == [("a", "b"), ("a", "b", "c"), ("a", "b", "c")]  # d does not disclose
    assert [face.id for face in state.enrolled] == ["a", "b", "c", "e"]


SPEC = {"one": Spec((), "float32", 0, 5)}
KNOWING = replace(GREETING, actions={"greet": Action(lambda _: ({}, {}), None, gives=lambda _: SPEC)})


@pytest.mark.parametrize(
    "payload",
    [
        {},
        {"two": torch.ones(3)},
        {"one": torch.ones(3), "two": torch.ones(3)},
        {"one": torch.ones(3, 1)},
        {"one": torch.ones(2)},
        {"one": torch.tensor(1.0)},
        {"one": torch.ones(3, dtype=torch.complex64)},
        {"one": torch.ones(3, dtype=torch.float64)},
        {"one": torch.full((3,), 6.0)},
        {"one": torch.full((3,), float("nan"))},
    ],
)
def test_replies_that_are_not_what_the_action_gives_count_as_none(payload: Payload) -> None:
    class Wrong(Town):
        def __call__(self, task: Task) -> Replies:
            replies = super().__call__(task)
            return replace(replies, payload=payload) if task.round == 0 else replies

    seen: list[Round] = []
    state = serve(
        KNOWING,
        Wrong(dict.fromkeys("abc", 9)),
        State(torch.zeros(1)),
        rounds=2,
        participation=Participation(),
        seed=1,
        observe=lambda round, _: seen.append(round),
    )
    assert [round.discarded for round in seen] == [("a", "b", "c"), ()]
    assert float(state.model) == 3.0


def test_a_task_that_all_refuse_ends_the_run_with_the_reason() -> None:
    class Refusing(Town):
        def __call__(self, task: Task) -> Replies:
            raise TaskRefused(f"{task.action!r} must lie between -1 and 1")

    seen: list[Round] = []
    state = serve(
        GREETING,
        Refusing({"a": 3}),
        State(torch.zeros(1)),
        rounds=5,
        participation=Participation(),
        seed=1,
        observe=lambda round, _: seen.append(round),
    )
    assert state.stopped == "clients refuse the task: 'greet' must lie between -1 and 1"
    assert [round.declined for round in seen] == [("a",)]


@pytest.mark.parametrize(
    ("purses", "participation", "why"),
    [
        ({"a": 5}, Participation(), "all rounds were run"),
        ({}, Participation(), "no client is enrolled; connect clients first"),
        ({"a": 0, "b": 0}, Participation(), "0 of 2 clients can afford a first round"),
        ({"a": 1, "b": 0}, Participation(), "0 of 2 clients can afford a further round"),
        ({"a": 9, "b": 1}, Participation(quorum=2), "1 of 2 clients can afford a further round, and 2 are needed"),
        (
            {"a": 9, "b": 1},
            Participation(including=frozenset("b")),
            "no client that must be in every cohort can afford a round",
        ),
    ],
)
def test_a_run_says_why_it_ended(purses: dict[str, int], participation: Participation, why: str) -> None:
    state = serve(GREETING, Town(purses), State(torch.zeros(1)), rounds=3, participation=participation, seed=1)
    assert state.stopped == why


def test_where_nobody_has_entered_nothing_is_learnt() -> None:
    class Broke(Town):
        def __call__(self, task: Task) -> Replies:
            self.tasks.append(task)
            return Replies((), {}, (), exhausted=task.to if task.round == 1 else ())

    paying = replace(
        GREETING, round_price=lambda scale: scale, round=lambda state, _: replace(state, model=state.model + 1)
    )
    town = Broke(dict.fromkeys("ab", 9))
    state = serve(paying, town, State(torch.zeros(1)), rounds=9, participation=Participation(), seed=1)
    assert float(state.model) == 0.0
    assert [task.round for task in town.tasks] == [0, 1]  # silent at first, then out of budget
    assert state.stopped == "0 of 2 clients can afford a further round"


def test_a_group_the_federation_does_not_have_is_refused() -> None:
    grouped = replace(GREETING, needs=("group",), groups=("open", "strict"))
    check_disclosure(grouped, [Profile("a", group="open")])
    with pytest.raises(InputError, match="client 'a' is in the group 'other', which this federation does not have"):
        check_disclosure(grouped, [Profile("a", group="other")])


def test_replies_are_handled_in_linear_time() -> None:
    def seconds(clients: int) -> float:
        town = Town({str(number): 9 for number in range(clients)})
        return min(round.seconds for round in watch(town, 3))

    assert seconds(20_000) < 40 * seconds(2_000) + 0.2  # it was 250 times, and 18 s


def test_secret_cohorts_need_no_seed() -> None:
    coins = Participation("poisson", 0.5)
    drawn = [coins.draw(EVERYONE, EVERYONE, None, 0) for _ in range(200)]
    assert len(set(drawn)) > 190
    assert abs(sum(map(len, drawn)) - 2000) < 6 * (200 * 20 / 4) ** 0.5
    with pytest.raises(InputError, match="give a seed"):
        Participation("epoch", 0.5).draw(EVERYONE, EVERYONE, None, 0)


# disclosure


def test_what_an_algorithm_needs_must_be_told() -> None:
    needy = replace(GREETING, needs=("epsilon", "examples"))
    told = Profile("a", examples=3, epsilon=1.0)
    check_disclosure(needy, [told])
    check_disclosure(GREETING, [Profile("b")])
    for hidden, name in ((replace(told, epsilon=None), "epsilon"), (replace(told, examples=None), "examples")):
        with pytest.raises(InputError, match=f"client 'a' does not disclose its {name}"):
            check_disclosure(needy, [told, hidden])


def test_nobody_is_asked_before_everybody_has_told() -> None:
    town = Town({"a": 1})
    with pytest.raises(InputError, match="does not disclose"):
        serve(
            replace(GREETING, needs=("epsilon",)),
            town,
            State(torch.zeros(1)),
            rounds=1,
            participation=Participation(),
            seed=1,
        )
    assert town.tasks == []


def test_without_any_client_that_must_be_there_the_run_ends() -> None:
    with_public = Participation("uniform", 0.5, including=frozenset({"a", "b"}))
    assert with_public.goes_on(["b", "c"])
    assert not with_public.goes_on(["c", "d"])
    assert Participation("uniform", 0.5).goes_on(["c", "d"])
    assert not Participation("uniform", 0.5, quorum=3).goes_on(["c", "d"])
