"""The rows that set budgets: from the terms of many clients, and back."""

from collections.abc import Iterator, Mapping
from typing import Any

from polyeps.accounting.events import event_from_dict, event_to_dict
from polyeps.core import Budget, check_name
from polyeps.errors import InputError
from polyeps.ledger.account import BudgetTerms
from polyeps.ledger.hash_chain import Draft

_FEW = 8  # clients with a row for each
_MANY = 5000  # budgets in one row


def budget_rows(terms: Mapping[str, BudgetTerms]) -> Iterator[Draft]:
    """Yield the rows that set clients' budgets: one for each client or, of many that differ in ε alone, for thousands.

    The order of a filter follows from ε, so clients with adaptive terms share a row only if they are equal in both.
    """
    check_name("a client's id", *terms)
    alike: dict[tuple[Any, ...], list[str]] = {}
    for client, agreed in terms.items():
        if not client.strip():
            raise InputError("a client needs a name")
        # Plans are compared as objects, which is quick: clients of one price share theirs.
        alike.setdefault((*agreed.but_epsilon[:-2], id(agreed.plan), agreed.person), []).append(client)
    for clients in alike.values():
        shared = _content(terms[clients[0]])
        for first in range(0, len(clients), _MANY):
            some = clients[first : first + _MANY]
            if len(some) <= _FEW:
                for client in some:
                    yield "budget", {"client": client, "epsilon": terms[client].budget.epsilon, **shared}
            else:
                epsilons = [terms[client].budget.epsilon for client in some]
                yield "budgets", {"clients": some, "epsilons": epsilons, **shared}


def _content(terms: BudgetTerms) -> dict[str, Any]:
    """Return the terms of a budget, except its ε, as a row has them."""
    content: dict[str, Any] = {
        "delta": terms.budget.delta,
        "unit": terms.unit,
        "adjacency": terms.adjacency,
        "schedule": terms.schedule,
        "order": terms.order,
    }
    if terms.person:
        content["person"] = terms.person
    if terms.schedule == "fixed":
        content["plan"] = None if terms.plan is None else event_to_dict(terms.plan)
    return content


def terms_of(content: Mapping[str, Any], epsilon: float) -> BudgetTerms:
    """Return the terms of a budget, as a row has them, with an ε."""
    plan, schedule = content.get("plan"), content["schedule"]
    if "plan" not in content:  # fixed ledgers of version 0.1 accepted any event, which only a filter allows
        schedule = "adaptive"
    return BudgetTerms(
        Budget(epsilon, content["delta"]),
        content["unit"],
        content["adjacency"],
        schedule,
        content["order"],
        None if plan is None else event_from_dict(plan),
        content.get("person", ""),
    )


def plain_text(text: str, missing: str) -> str:
    """Return text for the record; refuse empty text, and text that cannot be written as UTF-8."""
    if not text.strip():
        raise InputError(missing)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError(f"{text!r} cannot be written as UTF-8; use another name") from None
    return text
