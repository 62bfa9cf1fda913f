"""Tasks of packages that others wrote: RecBole, PyTorch Geometric and pykeen.

They are not among the requirements of the experiments. RecBole ships ml-100k, pykeen ships UMLS and
Kinships; the graph for Node2Vec is drawn, since PyTorch Geometric's own must be downloaded.
"""

import contextlib
import importlib
import logging
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from .methods import Rates, build, state_bytes
from .tasks import Result

# -- RecBole: BPR on ml-100k -----------------------------------------------------------------------


def _restore_names_of_numpy_1() -> None:
    """RecBole 1.2.1 uses names that NumPy 2 has dropped."""
    for old, new in {"float_": "float64", "complex_": "complex128", "unicode_": "str_"}.items():
        if not hasattr(numpy, old):
            setattr(numpy, old, getattr(numpy, new))


class BprResult(NamedTuple):
    """What RecBole measures of one run, by the names of its metrics."""

    best_valid: dict[str, float]
    test: dict[str, float]
    """Of the weights that were best on validation data."""
    state_bytes: int


def train_bpr(method: str, rates: Rates, seed: int, settings: dict[str, Any]) -> BprResult:
    """RecBole's BPR on its ml-100k, with its trainer; `settings` replace RecBole's own."""
    _restore_names_of_numpy_1()
    package = importlib.import_module("recbole")
    config_of: Any = importlib.import_module("recbole.config").Config
    data: Any = importlib.import_module("recbole.data")
    tools: Any = importlib.import_module("recbole.utils")
    path = Path(str(package.__file__)).parent / "dataset_example"
    # RecBole also writes its own logs into the working directory.
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        config = config_of(
            model="BPR",
            dataset="ml-100k",
            config_dict={
                "data_path": str(path),
                "checkpoint_dir": folder,
                "seed": seed,
                "reproducibility": False,
                "use_gpu": False,
                "show_progress": False,
                "state": "ERROR",
                "eval_batch_size": 1 << 20,
                **settings,
            },
        )
        logging.getLogger().setLevel(logging.ERROR)
        tools.init_seed(seed, False)
        train, valid, test = data.data_preparation(config, data.create_dataset(config))
        tools.init_seed(seed, False)
        model = tools.get_model("BPR")(config, train._dataset)
        trainer = tools.get_trainer(config["MODEL_TYPE"], "BPR")(config, model)
        tables = [name for name, _ in model.named_parameters()]
        trainer.optimizer = build(model, method, rates, tables=tables)
        _, best = trainer.fit(train, valid, show_progress=False, verbose=False)
        # RecBole's own way of loading does not work with torch's default for `weights_only`.
        saved = torch.load(trainer.saved_model_file, weights_only=False)
        model.load_state_dict(saved["state_dict"])
        found = trainer.evaluate(test, load_best_model=False, show_progress=False)
    return BprResult(dict(best), dict(found), state_bytes(trainer.optimizer, tables))


def recbole_bpr(method: str, rates: Rates, seed: int, *, epochs: int = 20) -> Result:
    """The best NDCG@10 on validation data after some epochs, evaluated at every fifth."""
    settings = {
        "epochs": epochs,
        "train_batch_size": 2048,
        "topk": [10],
        "metrics": ["NDCG"],
        "valid_metric": "NDCG@10",
        "stopping_step": 0,
        "eval_step": 5,
    }
    found = train_bpr(method, rates, seed, settings)
    return Result(found.best_valid["ndcg@10"], found.state_bytes)


# -- PyTorch Geometric: Node2Vec -------------------------------------------------------------------


def _uniform_walks(
    starts: Tensor, neighbours: Tensor, nodes: Tensor, length: int, p: float, q: float
) -> Tensor:
    """What pyg-lib's random_walk gives for p = q = 1, in torch operations."""
    assert p == q == 1.0
    walks = [nodes]
    for _ in range(length):
        degrees = starts[walks[-1] + 1] - starts[walks[-1]]
        steps = (torch.rand(len(nodes)) * degrees).long()
        walks.append(neighbours[starts[walks[-1]] + steps])
    return torch.stack(walks, 1)


@cache
def _node2vec() -> Any:
    """PyTorch Geometric's class; its compiled walks are in no package for this torch."""
    module: Any = importlib.import_module("torch_geometric.nn.models.node2vec")
    if not module.WITH_PYG_LIB:
        torch.library.define(
            "pyg::random_walk",
            "(Tensor rowptr, Tensor col, Tensor seed, int length, float p, float q) -> Tensor",
        )
        torch.library.impl("pyg::random_walk", "cpu", _uniform_walks)
        module.WITH_PYG_LIB = True
    return module.Node2Vec


def node2vec(method: str, rates: Rates, seed: int, *, epochs: int = 8) -> Result:
    """The accuracy of a classifier over PyTorch Geometric's Node2Vec, on a stochastic block model.

    2,400 nodes in 12 communities, with 10 neighbours of its own and 5 of others a node.
    """
    communities, size, own, other = 12, 200, 10, 5
    draw: Any = importlib.import_module("torch_geometric.utils").stochastic_blockmodel_graph
    torch.manual_seed(7)
    inside, outside = own / size, other / (size * (communities - 1))
    chances = torch.full((communities, communities), outside)
    edges = draw([size] * communities, chances.fill_diagonal_(inside), directed=False)
    labels = torch.arange(communities).repeat_interleave(size)
    order = torch.randperm(len(labels))
    torch.manual_seed(seed)
    model = _node2vec()(
        edges, 64, walk_length=20, context_size=10, walks_per_node=2, num_nodes=len(labels),
        sparse=True,
    )  # fmt: skip
    tables = ["embedding.weight"]
    optimizer = build(model, method, rates, tables=tables)
    for _ in range(epochs):
        for walks in model.loader(batch_size=128, shuffle=True):
            optimizer.zero_grad()
            model.loss(*walks).backward()
            optimizer.step()
    learned, tested = order[:800], order[800:]
    with torch.no_grad():
        rows = model()
        found = model.test(
            rows[learned], labels[learned], rows[tested], labels[tested], max_iter=300
        )
    return Result(float(found), state_bytes(optimizer, tables))


# -- pykeen: knowledge graphs ----------------------------------------------------------------------


def _knowledge_graph(
    dataset: str, method: str, rates: Rates, seed: int, *, epochs: int = 40
) -> Result:
    data: Any = getattr(importlib.import_module("pykeen.datasets"), dataset)()
    kind: Any = importlib.import_module("pykeen.models").DistMult
    training: Any = importlib.import_module("pykeen.training").SLCWATrainingLoop
    evaluator: Any = importlib.import_module("pykeen.evaluation").RankBasedEvaluator
    torch.manual_seed(seed)
    model = kind(triples_factory=data.training, embedding_dim=64, random_seed=seed)
    tables = [name for name, it in model.named_parameters() if it.requires_grad and it.dim() > 1]
    optimizer = build(model, method, rates, tables=tables)

    class Kept(type(optimizer)):  # type: ignore[misc]
        """pykeen makes an optimizer of the same class before it trains: this one makes none."""

        def __new__(cls, *_: Any, **__: Any) -> Any:
            return optimizer

        def __init__(self, *_: Any, **__: Any) -> None: ...

    optimizer.__class__ = Kept
    loop = training(model=model, triples_factory=data.training, optimizer=optimizer)
    loop.train(
        triples_factory=data.training, num_epochs=epochs, batch_size=256, use_tqdm=False,
        use_tqdm_batch=False,
    )  # fmt: skip
    found = evaluator().evaluate(
        model, data.validation.mapped_triples, batch_size=256, use_tqdm=False,
        additional_filter_triples=[data.training.mapped_triples],
    )  # fmt: skip
    rank = found.get_metric("both.realistic.inverse_harmonic_mean_rank")
    return Result(float(rank), state_bytes(optimizer, tables))


def umls(method: str, rates: Rates, seed: int) -> Result:
    """The mean reciprocal rank on validation triples of pykeen's DistMult on UMLS."""
    return _knowledge_graph("UMLS", method, rates, seed)


def kinships(method: str, rates: Rates, seed: int) -> Result:
    """The same on Kinships."""
    return _knowledge_graph("Kinships", method, rates, seed)
