"""Attempts to refute certificates: enumeration where it is possible, statistics, support and search where it is not."""

from polyeps.audit.own import audit_algorithm as audit_algorithm
from polyeps.audit.rows import Row as Row

__all__ = ["Row", "audit_algorithm"]
