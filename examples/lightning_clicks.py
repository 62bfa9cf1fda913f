"""A model of clicks under Lightning: two tables with sparse gradients, a network, one optimizer.

    pip install sketchoptim lightning
    python lightning_clicks.py

torch.optim needs two optimizers and a loop by hand for such a model: SparseAdam refuses dense
gradients, and Adam refuses sparse ones. Ours takes both, so automatic optimization works, with
gradient clipping set in the Trainer.
"""

import argparse
import logging
import warnings

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import sketchoptim as so

USERS, ADS, DIM, BATCH = 20_000, 5_000, 16, 512


class Clicks(lightning.LightningModule):
    """The logit of the probability that a user clicks an ad."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(USERS, DIM, sparse=True)
        self.ads = nn.Embedding(ADS, DIM, sparse=True)
        self.top = nn.Sequential(nn.Linear(2 * DIM, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, users: Tensor, ads: Tensor) -> Tensor:
        return self.top(torch.cat([self.users(users), self.ads(ads)], dim=1))[:, 0]

    def training_step(self, batch: list[Tensor]) -> Tensor:
        users, ads, clicks = batch
        return nn.functional.binary_cross_entropy_with_logits(self(users, ads), clicks)

    def validation_step(self, batch: list[Tensor]) -> None:
        users, ads, clicks = batch
        loss = nn.functional.binary_cross_entropy_with_logits(self(users, ads), clicks)
        self.log("held_out_loss", loss)

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = so.AdamW(so.param_groups(self, lr=0.03), lr=0.003, weight_decay=0.0)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def clicks(count: int) -> TensorDataset:
    """Every other user clicks often, and every other ad is clicked often."""
    users, ads = torch.randint(USERS, (count,)), torch.randint(ADS, (count,))
    probabilities = torch.tensor([0.02, 0.2, 0.8])[users % 2 + ads % 2]
    return TensorDataset(users, ads, (torch.rand(count) < probabilities).float())


def main() -> None:
    """Trains, and ends with status 1 if the model did not learn."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=780)
    steps = parser.parse_args().steps
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")  # advice on workers, deprecations
    torch.set_num_threads(1)  # the model is tiny: threads would wait for one another
    torch.manual_seed(0)
    so.enable_sparse_clipping()  # torch's clip_grad_norm_ refuses sparse gradients on CPUs
    model = Clicks()
    trainer = lightning.Trainer(
        max_steps=steps,
        accelerator="cpu",
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    held_out = DataLoader(clicks(20_000), batch_size=BATCH)
    before = trainer.validate(model, held_out, verbose=False)[0]["held_out_loss"]
    trainer.fit(model, DataLoader(clicks(400_000), batch_size=BATCH, shuffle=True))
    print(so.memory_report(trainer.optimizers[0]))
    after = trainer.validate(model, held_out, verbose=False)[0]["held_out_loss"]
    print(f"loss on held-out clicks: {before:.3f} before training, {after:.3f} after")
    if after > 0.55:  # 0.61 without a look at the ids; the best possible is 0.40
        raise SystemExit("the model did not learn")


if __name__ == "__main__":
    main()
