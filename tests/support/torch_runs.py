"""Models some steps into their training by an optimizer of torch.optim."""

import torch
from tiny_runs import TinyModel, batches, seeded


def dense_model(dtype=torch.float32):
    """The tiny model, whose tables have dense gradients as well."""
    model = TinyModel(dtype)
    model.table.sparse = model.late.sparse = False
    return seeded(model, 0)


def tables_of(model):
    return {"table": model.table.weight, "late": model.late.weight}


def train(model, optimizer, count, *, seed=1, scheduler=None):
    """The losses of so many steps."""
    losses = []
    for ids in batches(count, seed=seed):
        optimizer.zero_grad()
        loss = model.loss(ids)
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return losses


def started(kind, options, *, sparse, steps=5, lr=0.05):
    """A model some steps into its training, with the optimizer of what it trains."""
    model = seeded(TinyModel(), 0) if sparse else dense_model()
    named = tables_of(model) if sparse else dict(model.named_parameters())
    optimizer = kind(list(named.items()), lr=lr, **options)
    train(model, optimizer, steps)
    return model, optimizer, named
