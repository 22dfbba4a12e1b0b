"""Attempts to refute certificates, by enumeration where possible, else by statistics, support tests and search."""

from polyeps.audit.algorithm import audit_algorithm as audit_algorithm
from polyeps.audit.results import AuditResult as AuditResult

__all__ = ["AuditResult", "audit_algorithm"]
