"""FedHDP's equations (11) to (16) as printed, and the corrections of those that do not hold.

Two groups; N clients, N_p of them private, ρ = 1 − N_p/N opted out; x = N_p·γ² is a private message's noise;
Υ² = τ²/α² and Γ² = x/α². Formulas are written out, not taken from `points`, so that each can be held against the other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from polyeps.errors import InputError
from polyeps_reproductions.theory.points import Federation, opt_out


@dataclass(frozen=True)
class OptOut:
    """The paper's setting."""

    clients: int
    private: int
    alpha2: float
    tau2: float
    gamma2: float

    @classmethod
    def at_noise(cls, clients: int, private: int, alpha2: float, tau2: float, noise: float) -> OptOut:
        """With noise of standard deviation `noise` (z·S) in the *sum*: γ² = (noise/N_p)², as the privacy fixes it."""
        if private < 1:
            raise InputError("private is 0, so there is no noise; give at least one private client")
        return cls(clients, private, alpha2, tau2, (noise / private) ** 2)

    @property
    def federation(self) -> Federation:
        return opt_out(self.clients, self.private, self.alpha2, self.tau2, self.gamma2)

    @property
    def client_variance(self) -> float:
        """σ_c²."""
        return self.alpha2 + self.tau2

    @property
    def message_noise(self) -> float:
        """x = N_p·γ²."""
        return self.private * self.gamma2

    @property
    def opted_out(self) -> float:
        """ρ."""
        return 1 - self.private / self.clients

    @property
    def heterogeneity(self) -> float:
        """Υ²."""
        return self.tau2 / self.alpha2

    @property
    def privacy(self) -> float:
        """Γ²."""
        return self.message_noise / self.alpha2

    @property
    def best_ratio(self) -> float:
        """r* of Lemma 1."""
        return self.client_variance / (self.client_variance + self.message_noise)

    @property
    def best_variance(self) -> float:
        """(11): the server's, with r*."""
        return self.client_variance * (self.client_variance + self.message_noise) / (self.clients * self._spread)

    @property
    def fedavg_variance(self) -> float:
        """(12): with r = 1."""
        return (self.client_variance + (1 - self.opted_out) * self.message_noise) / self.clients

    @property
    def fedavg_gap(self) -> float:
        """(13): the gain of r* over r = 1."""
        return self.opted_out * (1 - self.opted_out) * self.message_noise**2 / (self.clients * self._spread)

    @property
    def dp_fedavg_gap_printed(self) -> float:
        """(14) as printed: the gain of r* over noise for all clients."""
        return (
            self.message_noise
            * self.opted_out
            * (self.client_variance + self.message_noise)
            / (self.clients * self._spread)
        )

    @property
    def dp_fedavg_variance_printed(self) -> float:
        """The variance that (14) implies: (σ_c² + N_p·γ²)/N, as if all clients sent a private client's noise."""
        return self.best_variance + self.dp_fedavg_gap_printed

    @property
    def dp_fedavg_variance(self) -> float:
        """DP-FedAvg at the same noise multiplier: the sum has noise (N_p·γ)² for any cohort, the mean (N_p/N)²γ².

        That is (12): no client gains by opting out as long as the server averages plainly, and (13) is the gap. The
        printed one has N/N_p times that noise, hence more privacy than anybody asked for.
        """
        return self.client_variance / self.clients + self.gamma2 * (self.private / self.clients) ** 2

    @property
    def dp_fedavg_gap(self) -> float:
        """(14) corrected."""
        return self.dp_fedavg_variance - self.best_variance

    @property
    def non_private_penalty(self) -> float:
        """(15): λ* of clients that opted out, α²/τ²."""
        return 1 / self.heterogeneity if self.tau2 else math.inf

    @property
    def private_penalty_printed(self) -> float:
        """(16) as printed."""
        n, p, tau, gamma = self.clients, self.private, self.heterogeneity, self.privacy
        below = n * tau * (tau + 1) + (n - p + 1) * tau * gamma + gamma
        return (n + n * tau + (n - p) * gamma) / below if below else math.inf

    @property
    def private_penalty(self) -> float:
        """(16) for the rule that is run: N − 1 where 1/λ = Υ² + Γ²(1 + Υ²)/(N(1 + Υ²) + (N − N_p)Γ²) has N.

        The printed one gives the *others'* mean the coefficient it has in (8). It would be right, had the client
        taken its own noise out of θ̂, which it cannot: the server adds it.
        """
        n, p, tau, gamma = self.clients, self.private, self.heterogeneity, self.privacy
        inverse = tau + gamma * (1 + tau) / ((n - 1) * (1 + tau) + (n - p) * gamma)
        return 1 / inverse if inverse else math.inf

    @property
    def _spread(self) -> float:
        return self.client_variance + self.opted_out * self.message_noise
