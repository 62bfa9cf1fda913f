"""Texts and examples: files -> words -> vocabulary by count -> ids."""

from .arrays import load_array
from .corpus import Corpus, Part, segment, segments
from .interactions import Interactions, Pairs, read_interactions
from .labelled import LabelledTexts, labelled_file, read_labelled
from .orders import shuffled
from .python_sources import read_python_sources, source_files
from .texts import draw_text, read_lm1b, read_text, read_wikitext
from .vectors import LabelledVectors, NoisyViews, read_vectors, token_vectors, token_vectors_file
from .vocabulary import Vocabulary

__all__ = [
    "Corpus",
    "Interactions",
    "LabelledTexts",
    "LabelledVectors",
    "NoisyViews",
    "Pairs",
    "Part",
    "Vocabulary",
    "draw_text",
    "labelled_file",
    "load_array",
    "read_interactions",
    "read_labelled",
    "read_lm1b",
    "read_python_sources",
    "read_text",
    "read_vectors",
    "read_wikitext",
    "segment",
    "segments",
    "shuffled",
    "source_files",
    "token_vectors",
    "token_vectors_file",
]
