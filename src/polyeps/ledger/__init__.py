"""The privacy ledger: budgets are set once; charges are on disk before data is read, and refused beyond the budget."""

from polyeps.ledger.ledger import Ledger

__all__ = ["Ledger"]
