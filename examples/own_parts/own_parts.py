"""Own algorithm, model, encoder, metric and tracker as arguments of `run`: experiment.toml in Python."""

from tempfile import TemporaryDirectory

from balanced_accuracy import balanced_accuracy
from best_round import BestRound
from random_projection import random_projection
from small_net import small_net
from trimmed_mean import trimmed_mean

from polyeps import Experiment, run

experiment = Experiment(
    name="own-parts",
    rounds=12,
    data={"name": "digits"},
    budgets={"epsilons": [2.0, 3.0, 4.0, 8.0, 9.0, 10.0], "delta": 1e-4},
    model={"name": "small-net", "encoder": "projection"},
    training={"local_steps": 10, "learning_rate": 0.5},
    algorithm=[{"name": "trimmed-mean", "trim": 0.2}, {"name": "fedavg"}],
)
with TemporaryDirectory() as folder:
    outcome = run(
        experiment,
        f"{folder}/run",
        algorithms={"trimmed-mean": trimmed_mean},
        models={"small-net": small_net},
        encoders={"projection": random_projection},
        metrics={"balanced_accuracy": balanced_accuracy},
        trackers=[BestRound()],
    )
for (method, _), accuracies in outcome.accuracy.items():
    print(f"{method}: {accuracies[-1]:.1%} of the test digits read correctly")
print("spent:", {client: round(epsilon, 3) for client, epsilon in outcome.spent["trimmed-mean", 1].items()})
