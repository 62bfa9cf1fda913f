"""Libraries that build optimizers themselves: each trains with ours, by one line.

They are no requirement of the tests: `make test-clients` installs them beside the library, in an
environment of its own.
"""

import importlib
import importlib.util
import logging
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import sketchoptim as so

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs


def imported(name: str) -> Any:
    return pytest.importorskip(name, reason=f"{name} is not installed; see make test-clients")


@pytest.fixture(scope="module", autouse=True)
def usable_torchvision() -> None:
    """A torchvision that was built for another torch lacks operators, of which none is used."""
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for operator in ("nms", "qnms"):
            torch.library.define(
                f"torchvision::{operator}", "(Tensor a, Tensor b, float c) -> Tensor"
            )
        for name in [name for name in sys.modules if name.startswith("torchvision")]:
            del sys.modules[name]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of them write logs and configurations."""
    monkeypatch.chdir(tmp_path)


def compressed_shapes(optimizer: so.optim.Optimizer) -> list[list[int]]:
    """The shapes of the parameters whose state is compressed."""
    return [list(it.shape) for it, state in optimizer.state.items() if state["is_compressed"]]


# -- pykeen and class_resolver ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Adam", "AdamW", "Adagrad", "RMSprop", "SGD"])
def test_class_resolver_makes_an_optimizer(name):
    resolver = imported("class_resolver.contrib.torch").optimizer_resolver
    options = {"params": nn.Embedding(2000, 4).parameters(), "lr": 0.5, "compress": "tables"}
    made = resolver.make(getattr(so, name), options)
    assert type(made) is getattr(so, name)
    assert made.defaults["compress"] == "tables"


@pytest.mark.parametrize("memory", ["lean", "exact"])
def test_pykeen_trains_umls_in_its_pipeline(memory, tmp_path):
    """It rebuilds the optimizer from its state_dict, and writes its options to a file."""
    imported("pykeen")
    result = importlib.import_module("pykeen.pipeline").pipeline(
        dataset="umls",
        model="DistMult",
        model_kwargs={"embedding_dim": 32},
        optimizer=so.Adam,
        optimizer_kwargs={"lr": 0.05, "memory": memory, "compress": "all"},
        training_kwargs={"num_epochs": 20, "use_tqdm": False, "use_tqdm_batch": False},
        evaluation_kwargs={"use_tqdm": False},
        random_seed=1,
        clear_optimizer=False,
    )
    assert type(result.training_loop.optimizer) is so.Adam
    optimizer = result.training_loop.optimizer
    assert len(compressed_shapes(optimizer)) == (2 if memory == "lean" else 0)
    assert (so.memory_report(optimizer).ratio < 0.05) is (memory == "lean")
    assert result.losses[-1] < 0.7 * result.losses[0]
    result.save_to_directory(tmp_path)
    assert (tmp_path / "results.json").exists()


# -- RecBole ---------------------------------------------------------------------------------------


def test_recbole_trains_bpr_on_ml_100k(tmp_path, monkeypatch):
    for old, new in {"float_": "float64", "complex_": "complex128", "unicode_": "str_"}.items():
        monkeypatch.setattr(numpy, old, getattr(numpy, new), raising=False)  # of NumPy 1
    package = imported("recbole")
    config_of = importlib.import_module("recbole.config").Config
    data = importlib.import_module("recbole.data")
    tools = importlib.import_module("recbole.utils")
    monkeypatch.setattr(sys, "argv", ["recbole"])
    config = config_of(
        model="BPR",
        dataset="ml-100k",
        config_dict={
            "data_path": str(Path(package.__file__).parent / "dataset_example"),
            "checkpoint_dir": str(tmp_path),
            "epochs": 4,
            "use_gpu": False,
            "state": "ERROR",
            "show_progress": False,
            "topk": [10],
            "metrics": ["NDCG"],
            "valid_metric": "NDCG@10",
        },
    )
    logging.getLogger().setLevel(logging.ERROR)
    tools.init_seed(1, False)
    train, valid, _ = data.data_preparation(config, data.create_dataset(config))
    model = tools.get_model("BPR")(config, train._dataset)
    trainer = tools.get_trainer(config["MODEL_TYPE"], "BPR")(config, model)
    trainer.optimizer = so.Adam(so.param_groups(model, min_rows=500), lr=0.005)
    best, _ = trainer.fit(train, valid, saved=True, show_progress=False, verbose=False)
    assert best > 0.1
    assert len(compressed_shapes(trainer.optimizer)) == 2
    checkpoint = torch.load(trainer.saved_model_file, weights_only=False)
    trainer.optimizer.load_state_dict(checkpoint["optimizer"])


# -- PyTorch Geometric -----------------------------------------------------------------------------


def uniform_walks(starts: Any, neighbours: Any, nodes: Any, length: int, p: float, q: float) -> Any:
    """What pyg-lib's random_walk gives for p = q = 1; no package has it for every torch."""
    walks = [nodes]
    for _ in range(length):
        degrees = starts[walks[-1] + 1] - starts[walks[-1]]
        steps = (torch.rand(len(nodes)) * degrees).long()
        walks.append(neighbours[starts[walks[-1]] + steps])
    return torch.stack(walks, 1)


@pytest.mark.parametrize("is_sparse", [True, False])
def test_node2vec_of_pytorch_geometric_learns(is_sparse):
    imported("torch_geometric")
    module = importlib.import_module("torch_geometric.nn.models.node2vec")
    if not module.WITH_PYG_LIB:
        torch.library.define(
            "pyg::random_walk",
            "(Tensor rowptr, Tensor col, Tensor seed, int length, float p, float q) -> Tensor",
        )
        torch.library.impl("pyg::random_walk", "cpu", uniform_walks)
        module.WITH_PYG_LIB = True
    torch.manual_seed(1)
    edges = torch.randint(1500, (2, 12_000))
    edges = torch.cat([edges, edges.flip(0), torch.arange(1500).repeat(2, 1)], 1)
    model = module.Node2Vec(edges, 16, walk_length=8, context_size=4, sparse=is_sparse)
    optimizer = so.Adam(model.parameters(), lr=0.05, compress="tables")
    losses = []
    for _ in range(3):
        for walks in model.loader(batch_size=128, shuffle=True):
            optimizer.zero_grad()
            loss = model.loss(*walks)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    assert compressed_shapes(optimizer) == [[1500, 16]]


# -- timm ------------------------------------------------------------------------------------------


@pytest.fixture
def timm() -> Any:
    module = imported("timm")
    importlib.import_module("timm.optim")
    importlib.import_module("sketchoptim.timm")
    return module


@pytest.mark.parametrize("name", ["Adam", "AdamW", "Adagrad", "RMSprop", "SGD"])
def test_timm_creates_each_optimizer_by_its_name(timm, name):
    model = nn.Sequential(nn.Embedding(2000, 4), nn.Linear(4, 4))
    optimizer = timm.optim.create_optimizer_v2(model, f"so-{name.lower()}", lr=0.1, momentum=0.0)
    assert type(optimizer) is getattr(so, name)
    model(torch.arange(64)).square().sum().backward()
    optimizer.step()
    assert compressed_shapes(optimizer) == [[2000, 4]]


def test_timm_trains_a_model_with_layer_decay(timm):
    """It puts options of its own into the groups."""
    model = timm.create_model("vit_tiny_patch16_224", num_classes=10, depth=2, img_size=32)
    optimizer = timm.optim.create_optimizer_v2(model, "so-adamw", lr=1e-3, layer_decay=0.75)
    assert "lr_scale" in optimizer.param_groups[0]
    images, labels = torch.randn(4, 3, 32, 32), torch.arange(4)
    losses = []
    for _ in range(4):
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


# -- Lightning's command line and torchtune's configuration ----------------------------------------


def test_lightning_cli_takes_the_class_by_its_path(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["fit"])
    imported("jsonargparse")
    lightning = imported("lightning")
    command_line = importlib.import_module("lightning.pytorch.cli").LightningCLI

    class Classifier(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.dense = nn.Embedding(2000, 4), nn.Linear(4, 2)

        def training_step(self, batch: Any) -> torch.Tensor:
            ids, labels = batch
            return nn.functional.cross_entropy(self.dense(self.table(ids)), labels)

        def train_dataloader(self) -> Any:
            ids = torch.arange(64)
            return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(ids, ids % 2))

    options = {"max_epochs": 1, "accelerator": "cpu", "devices": 1, "logger": "false"}
    for extra in ("checkpointing", "progress_bar", "model_summary"):
        options[f"enable_{extra}"] = "false"
    arguments = [f"--trainer.{key}={it}" for key, it in options.items()]
    arguments += ["--optimizer=sketchoptim.AdamW", "--optimizer.lr=0.1"]
    built = command_line(Classifier, args=["fit", *arguments, "--optimizer.compress=tables"])
    (optimizer,) = built.trainer.optimizers
    assert compressed_shapes(optimizer) == [[2000, 4]]


def test_torchtune_builds_the_class_from_its_configuration():
    imported("torchtune")
    instantiate = importlib.import_module("torchtune.config").instantiate
    options = {"_component_": "sketchoptim.AdamW", "lr": 0.1, "compress": "tables"}
    configuration = imported("omegaconf").OmegaConf.create(options)
    optimizer = instantiate(configuration, nn.Embedding(2000, 4).parameters())
    assert type(optimizer) is so.AdamW
    assert optimizer.param_groups[0]["compress"] == "tables"


# -- axolotl ---------------------------------------------------------------------------------------


def test_a_plugin_gives_the_trainer_of_axolotl_its_optimizer(tmp_path, monkeypatch):
    """The class of the page; the trainer's own part is loaded from its file, without its siblings,
    which need packages for GPUs."""
    integrations = imported("axolotl.integrations.base")
    transformers = imported("transformers")
    page = Path(__file__).parents[2] / "docs/howto/clients.md"
    (plugin,) = [it for it in page.read_text("utf-8").split("```") if "(BasePlugin)" in it]
    (tmp_path / "my_plugin.py").write_text(plugin, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    mixin = Path(integrations.__file__).parents[1] / "core/trainers/mixins/optimizer.py"
    spec = importlib.util.spec_from_file_location("axolotl_optimizer", mixin)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    shape = {"n_positions": 8, "n_embd": 16, "n_layer": 1, "n_head": 2}
    config = transformers.GPT2Config(vocab_size=2000, bos_token_id=0, eos_token_id=0, **shape)
    model = transformers.GPT2LMHeadModel(config)
    fixed = {"loraplus_lr_ratio": None, "embedding_lr_scale": None, "embedding_lr": None}
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=3, use_cpu=True, report_to=[], save_strategy="no"
    )
    for name, value in {**fixed, "lr_groups": None}.items():  # options that axolotl adds
        setattr(arguments, name, value)
    examples = [{"input_ids": [i] * 8, "labels": [i] * 8} for i in range(24)]
    trainer = module.OptimizerMixin(model=model, args=arguments, train_dataset=examples)
    manager = integrations.PluginManager.get_instance()
    manager.register("my_plugin.Sketchoptim")
    options = importlib.import_module("axolotl.utils.dict").DictDefault(learning_rate=0.01)
    manager.post_trainer_create(options, trainer)
    before = model.transformer.wte.weight.detach().clone()
    trainer.train()
    optimizer = trainer.create_optimizer()
    assert type(getattr(optimizer, "optimizer", optimizer)) is so.AdamW
    assert not torch.equal(model.transformer.wte.weight, before)
    assert [2000, 16] in compressed_shapes(getattr(optimizer, "optimizer", optimizer))
