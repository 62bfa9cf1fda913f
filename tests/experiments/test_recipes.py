import re
from pathlib import Path

import pytest

import experiments.studies
import sketchoptim as so
from experiments.data import DataSettings
from experiments.recipes import SweepSettings, load_recipe, parse_recipe, recipe_names

STUDIES = Path(experiments.studies.__file__).parent
TEXT = """
title = "A test"
reference = "none"
[data]
kind = "text"
path = "text.txt"
[full]
about = "large"
[full.model]
dim = 8
[full.train]
table_lr = 1
epochs = 3
[small]
about = "small"
data = { path = "small.txt" }
seeds = [4, 5]
[small.train]
table_lr = 0.1
steps = 7
[small.sweep]
table_lr = [0.1, 1.0]
[methods.exact]
optimizer = "adagrad"
memory = "exact"
paper = { perplexity = 57.63 }
[methods.own]
title = "our own"
small = { table_lr = [0.5] }
options = { betas = [0.5, 0.9] }
memory = { clip = 1.0, second = { kind = "Sketched", width = 16, decay = "bucket" } }
"""


@pytest.mark.parametrize("name", recipe_names())
def test_every_packaged_recipe_is_valid_and_has_a_small_size(name):
    recipe = load_recipe(name)
    assert recipe.name == name
    assert "small" in recipe.sizes
    assert recipe.contestants["lean"].method.memory == so.Memory.of("lean")


@pytest.mark.parametrize("path", sorted(STUDIES.glob("*.toml")), ids=lambda path: path.stem)
def test_every_recipe_of_the_studies_is_valid(path):
    train = load_recipe(str(path)).sizes["small"].train
    assert train.steps > 0 or train.epochs > 0


def test_the_paper_has_its_recipes():
    assert {
        "wikitext2-momentum",
        "wikitext2-adam",
        "wikitext103-adagrad",
        "lm1b-adam",
        "megaface-lsh",
        "amazon-mach",
    } <= {*recipe_names()}


def test_a_recipe_is_read_with_defaults_filled_in():
    recipe = parse_recipe("test", TEXT)
    full, small = recipe.sizes["full"], recipe.sizes["small"]
    assert (full.model.dim, small.model.dim) == (8, 256)
    assert (full.train.epochs, small.train.steps) == (3, 7)
    assert full.data == DataSettings(kind="text", path="text.txt")
    assert small.data == DataSettings(kind="text", path="small.txt")
    assert small.seeds == (4, 5)


def test_a_method_can_have_another_memory_and_batch_in_one_size():
    text = TEXT.replace(
        'title = "our own"', 'title = "our own"\nfull = { memory = "exact", batch = 9 }'
    )
    own = parse_recipe("test", text).contestants["own"]
    assert own.method_in("full").memory == so.Memory.of("exact")
    assert own.method_in("full").batch == 9
    assert own.method_in("small") == own.method


def test_a_method_has_its_own_memory_title_options_and_rates():
    recipe = parse_recipe("test", TEXT)
    own = recipe.contestants["own"]
    assert own.method.memory == so.Memory(second=so.Sketched(width=16, decay="bucket"), clip=1.0)
    assert own.method.title == "our own"
    assert own.method.options == {"betas": [0.5, 0.9]}
    assert recipe.sweep(own, "small") == SweepSettings(table_lr=(0.5,))
    assert recipe.sweep(recipe.contestants["exact"], "small").table_lr == (0.1, 1.0)
    assert recipe.contestants["exact"].paper == {"perplexity": 57.63}


def test_methods_are_chosen_by_name():
    recipe = parse_recipe("test", TEXT)
    assert [c.method.name for c in recipe.select(["own"])] == ["own"]
    assert [c.method.name for c in recipe.select(None)] == ["exact", "own"]
    with pytest.raises(ValueError, match="method must be one of exact, own, got 'lean'"):
        recipe.select(["lean"])


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("dim = 8", "dims = 8", "test: full.model.dims is not known; allowed are dim, hidden"),
        ("dim = 8", 'dim = "8"', "test: full.model.dim must be a whole number, got '8'"),
        ("dim = 8", "dim = 0", "test: full.model: dim must be >= 1, got 0"),
        ("dim = 8", "dim = true", "test: full.model.dim must be a whole number, got True"),
        ("table_lr = 1\n", "", "test: full.train.table_lr is missing"),
        ("epochs = 3", "", "test: full.train: steps must be >= 1, or epochs instead"),
        ("table_lr = 1\n", "table_lr = inf\n", "table_lr must be finite and > 0, got inf"),
        ("seeds = [4, 5]", "seeds = 4", "test: small.seeds must be a list, got 4"),
        ("seeds = [4, 5]", "seeds = []", "test: small: seeds must be at least one, got none"),
        ("seeds = [4, 5]", "log_every = 0", "test: small: log_every must be >= 1, got 0"),
        ("perplexity = 57.63", 'perplexity = "low"', "paper.perplexity must be a number, got 'low"),
        (
            'memory = "exact"',
            "options = { bettas = 1 }",
            "options of method 'exact': Adagrad.__init",
        ),
        ('data = { path = "small.txt" }', "data = 3", "test: small.data must be a table, got 3"),
        ("seeds = [4, 5]", "seeds = [0.5]", "test: small.seeds must be a whole number, got 0.5"),
        ('"adagrad"', '"lion"', "methods.exact.optimizer must be one of ['adam', 'adamw',"),
        ('memory = "exact"', 'memory = "tiny"', "methods.exact.memory: memory must be a Memory or"),
        ('"bucket"', '"none"', "methods.own.memory: decay must be one of"),
        ('kind = "text"', 'kind = "html"', "full.data.kind must be one of ['wikitext', 'lm1b',"),
        ("[small]", "[tiny]", "test.tiny is not known; allowed are title, reference, metric"),
        ("[data]", "[data", "recipe test is not TOML: "),
    ],
)
def test_a_mistake_is_named_with_its_key_and_what_is_allowed(before, after, message):
    assert before in TEXT
    text = TEXT.replace(before, after)
    if before == "[small]":
        text = text.replace("[small.", "[tiny.")
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_recipe("test", text)


@pytest.mark.parametrize("name", ["../lean", "a/b", "/lean", "..", ".hidden", "", "a b", "-x"])
def test_a_method_cannot_be_named_so_that_it_leaves_its_folder(name):
    text = TEXT.replace("methods.own", f'methods."{name}"')
    message = f"test: methods.{name}: a method's name must be letters, digits, '-', '_' and '.'"
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_recipe("test", text)


def test_an_unknown_recipe_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match=r"must be a \.toml file or one of .*wikitext2-adam"):
        load_recipe("wikitext3")


def test_a_recipe_of_your_own_is_read_from_its_file(tmp_path):
    (tmp_path / "mine.toml").write_text(TEXT, encoding="utf-8")
    assert load_recipe(str(tmp_path / "mine.toml")).name == "mine"
    with pytest.raises(FileNotFoundError, match="no recipe at"):
        load_recipe(str(tmp_path / "other.toml"))
