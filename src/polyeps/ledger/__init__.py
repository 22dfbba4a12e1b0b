"""A client's privacy ledger: budgets set once, charges on disk before data is touched, refused when they do not fit."""

from polyeps.ledger.ledger import Ledger

__all__ = ["Ledger"]
