"""Four models of one's own, each trained by four clients with budgets of their own, as scikit-learn classifiers."""

from bidirectional_lstm import bidirectional_lstm
from frozen_resnet import frozen_resnet
from layernorm_mlp import layernorm_mlp
from lora_gpt import lora_gpt
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from polyeps import PrivateFederation

digits = load_digits()
wards = [("ash", "birch", "cedar", "elm")[number % 4] for number in range(len(digits.target))]
split = train_test_split(digits.images / 16, digits.target, wards, random_state=1)
images, test_images, labels, test_labels, clients, _ = split

rates = {layernorm_mlp: 1.0, bidirectional_lstm: 4.0, lora_gpt: 1.0, frozen_resnet: 0.1}
for model, learning_rate in rates.items():
    federation = PrivateFederation(
        model,
        budgets={"ash": 2.0, "birch": 4.0, "cedar": 8.0, "elm": 10.0},
        delta=1e-4,
        rounds=8,
        batch=16,
        local_steps=5,
        learning_rate=learning_rate,
    )
    federation.fit(images, labels, client=clients, test=(test_images, test_labels))
    spent = {client: round(epsilon, 3) for client, epsilon in federation.spent_.items()}
    print(f"{model.__name__}: {federation.score(test_images, test_labels):.1%} of the test digits; spent {spent}")
