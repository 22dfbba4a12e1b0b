"""Six clients, each with a privacy budget of its own, learn to read digits together."""

from tempfile import TemporaryDirectory

from polyeps import Experiment, run

experiment = Experiment(
    rounds=20,
    budgets={"epsilons": [0.2, 0.3, 0.5, 8.0, 9.0, 10.0], "delta": 1e-4},
    training={"batch": 8, "local_steps": 10, "learning_rate": 0.2},
    algorithm="weiavg",
)
with TemporaryDirectory() as folder:
    outcome = run(experiment, f"{folder}/run")
print(f"{outcome.accuracy['weiavg', 1][-1]:.1%} of the test digits read correctly")
print("spent:", {client: round(epsilon, 3) for client, epsilon in outcome.spent["weiavg", 1].items()})
