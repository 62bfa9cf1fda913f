"""Which share of the weights of well-known models is in tables: a table of the README.

    python -m experiments.studies.table_shares

Models are built from their published configurations on the meta device, so that nothing is
downloaded and no weight takes memory. `so.find_tables` finds their tables. Needs transformers.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

import sketchoptim as so
from sketchoptim import moments
from sketchoptim._formatting import readable_bytes
from sketchoptim.moments import Table

from ..errors import run_study

ADAM_BYTES = 8  # for each weight, two float32 numbers

# A published configuration: the classes of transformers, and what differs from their defaults.
# The source is the config.json of that repository on the Hugging Face Hub.
Published = tuple[str, str, str, dict[str, Any]]
LLAMA: dict[str, Any] = {"vocab_size": 128_256, "num_key_value_heads": 8}
MODELS: tuple[Published, ...] = (
    (
        "XLM-RoBERTa base",  # FacebookAI/xlm-roberta-base
        "XLMRobertaForMaskedLM",
        "XLMRobertaConfig",
        {"vocab_size": 250_002, "max_position_embeddings": 514, "type_vocab_size": 1},
    ),
    (
        "Gemma 3 270M",  # google/gemma-3-270m
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {
            "vocab_size": 262_144,
            "hidden_size": 640,
            "intermediate_size": 2_048,
            "num_hidden_layers": 18,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
        },
    ),
    ("GPT-2 small", "GPT2LMHeadModel", "GPT2Config", {}),  # openai-community/gpt2
    (
        "Qwen2.5 0.5B",  # Qwen/Qwen2.5-0.5B
        "Qwen2ForCausalLM",
        "Qwen2Config",
        {
            "vocab_size": 151_936,
            "hidden_size": 896,
            "intermediate_size": 4_864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
        },
    ),
    ("BERT base", "BertForMaskedLM", "BertConfig", {}),  # google-bert/bert-base-uncased
    (
        "Llama 3.2 1B",  # meta-llama/Llama-3.2-1B
        "LlamaForCausalLM",
        "LlamaConfig",
        {
            **LLAMA,
            "hidden_size": 2_048,
            "intermediate_size": 8_192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "tie_word_embeddings": True,
        },
    ),
    (
        "Llama 3.1 8B",  # meta-llama/Llama-3.1-8B
        "LlamaForCausalLM",
        "LlamaConfig",
        {
            **LLAMA,
            "hidden_size": 4_096,
            "intermediate_size": 14_336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
        },
    ),
    (
        "Llama 3.1 70B",  # meta-llama/Llama-3.1-70B
        "LlamaForCausalLM",
        "LlamaConfig",
        {
            **LLAMA,
            "hidden_size": 8_192,
            "intermediate_size": 28_672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
        },
    ),
)

# The sizes of facebookresearch/dlrm for the Criteo Kaggle data, bench/dlrm_s_criteo_kaggle.sh; the
# rows of its 26 tables are the categories in the data.
CRITEO_ROWS = (
    *(1_460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5_683, 8_351_593, 3_194),
    *(27, 14_992, 5_461_306, 10, 5_652, 2_173, 4, 7_046_547, 18, 15, 286_181, 105, 142_572),
)
CRITEO_DIM = 16
CRITEO_BOTTOM, CRITEO_TOP = (13, 512, 256, 64, 16), (512, 256, 1)


def dlrm() -> nn.Module:
    """The tables, the network below the interactions and the one above them."""
    vectors = len(CRITEO_ROWS) + 1  # one for each table, and one from the dense features
    interactions = CRITEO_DIM + vectors * (vectors - 1) // 2
    return nn.ModuleDict(
        {
            "tables": nn.ModuleList(nn.EmbeddingBag(rows, CRITEO_DIM) for rows in CRITEO_ROWS),
            "bottom": _perceptron(*CRITEO_BOTTOM),
            "top": _perceptron(interactions, *CRITEO_TOP),
        }
    )


def _perceptron(*sizes: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(*pair) for pair in pairwise(sizes)))


def builders() -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    """Each model's name, and what builds it."""
    import transformers  # takes seconds

    yield "DLRM on Criteo Kaggle", dlrm
    for name, kind, configuration, options in MODELS:
        config = getattr(transformers, configuration)(**options)
        yield name, partial(getattr(transformers, kind), config)


def table_row(name: str, model: nn.Module) -> str:
    """A line of Markdown."""
    tables = so.find_tables(model)
    rows, dim = max(tables.values(), key=torch.Tensor.numel).shape
    more = "" if len(tables) == 1 else f" and {len(tables) - 1} more"
    in_tables = sum(table.numel() for table in tables.values())
    weights = sum(parameter.numel() for parameter in model.parameters())
    adam = ADAM_BYTES * weights
    lean = ADAM_BYTES * (weights - in_tables) + sum(lean_bytes(*it) for it in tables.items())
    share = f"{100 * in_tables / weights:.1f} %"
    cells = [name, f"{rows:,} x {dim:,}{more}", share, readable_bytes(adam), readable_bytes(lean)]
    return f"| {' | '.join(cells)} |"


def lean_bytes(name: str, table: nn.Parameter) -> int:
    """The state of a table in the preset "lean"."""
    second = so.Memory.of("lean").second
    assert second is not None
    shape = Table(table.shape, table.dtype, table.device, name)
    return sum(part.nbytes(table.dtype) for part in moments.declare(second, "second", shape))


def main(arguments: list[str] | None = None) -> None:
    """Prints the table."""
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0]).parse_args(arguments)
    print("| model | largest table | weights in tables | Adam's state | with lean tables |")
    print("| --- | --- | --- | --- | --- |")
    for name, build in builders():
        with torch.device("meta"):
            print(table_row(name, build()))


if __name__ == "__main__":
    run_study(main)
