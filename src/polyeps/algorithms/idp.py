"""IDP: one noise multiplier for all clients, and for each a sampling rate that spends its budget (the paper's Sample).

Paper: Boenisch et al., "Have it your way: Individualized Privacy Assignment for DP-SGD", NeurIPS 2023,
https://arxiv.org/abs/2303.17046

    q_p  the "rate" of a client's settings      σ_sample  the noise multiplier, the same for all
    B  training.batch: the divisor of all clients' gradient sums, and the mean over clients of q_p times records

A strict client is seen rarely instead of noisily. Since all divide by the same B, a client's records count in the mean
in proportion to its rate, and no other weights are needed.

Departures: the paper gives rates to the records of one data set, which share one noise; here each client holds records
of one budget and adds noise of its own, since nobody is trusted with the sum. The noise multiplier is searched, as in
the paper, such that batches have the usual size on average; `budgets.noise_multiplier` sets another one. Rates go up to
1 (0.1 in the paper's code).

A client's rate shows in the length of its updates, so budgets are disclosed in effect; the search reads all of them.
"""

from dataclasses import replace

from polyeps.algorithms.fedavg import fedavg
from polyeps.core import Algorithm
from polyeps.training import Training


def idp(training: Training) -> Algorithm:
    """Return averaging of updates whose clients differ in their sampling rates, not in their noise."""
    return replace(fedavg(training), needs=("epsilon",), claimed=None)
