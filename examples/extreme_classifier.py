"""An extreme classifier: 20,000 classes, with the likely ones found by hashing.

    pip install sketchoptim
    python extreme_classifier.py

Every class has a center, and an example is a noisy view of one. `LSHSoftmax` trains each example
against its label and the classes that are hashed to the same buckets, not against all classes.
"""

import argparse

import torch
from torch import Tensor, nn

import sketchoptim as so

CLASSES, FEATURES, DIM, BATCH = 20_000, 64, 64, 512


class Classifier(nn.Module):
    """An encoder, and a table with a row for each class."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(FEATURES, DIM)
        self.head = so.nn.LSHSoftmax(
            DIM, CLASSES, bits=8, tables=8, budget=64, negatives=32, rebuild_every=25
        )

    def encode(self, features: Tensor) -> Tensor:
        return 4 * nn.functional.normalize(self.encoder(features), dim=1)

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        return self.head(self.encode(features), labels)

    @torch.no_grad()
    def accuracy(self, features: Tensor, labels: Tensor) -> float:
        """The share of examples whose label has the largest logit of all classes."""
        best = self.head.top_k(self.encode(features), 1)
        return (best[:, 0] == labels).float().mean().item()


def main() -> None:
    """Trains, and ends with status 1 if the model did not learn."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    centers = nn.functional.normalize(torch.randn(CLASSES, FEATURES), dim=1)

    def views(labels: Tensor) -> Tensor:
        return centers[labels] + 0.05 * torch.randn(len(labels), FEATURES)

    test_labels = torch.randint(CLASSES, (2000,))
    test_features = views(test_labels)
    model = Classifier()
    optimizer = so.Adam(so.param_groups(model, lr=0.03), lr=0.001)
    before = model.accuracy(test_features, test_labels)
    for step in range(1, steps + 1):
        labels = torch.randint(CLASSES, (BATCH,))
        loss = model(views(labels), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            print(f"step {step}: loss over the classes found {loss.item():.3f}")
    after = model.accuracy(test_features, test_labels)
    print(so.memory_report(optimizer))
    print(f"accuracy among {CLASSES:,} classes: {before:.1%} before training, {after:.1%} after")
    if after < 0.5:
        raise SystemExit("the model did not learn")


if __name__ == "__main__":
    main()
