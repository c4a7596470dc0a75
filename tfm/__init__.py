"""tfm: sequence transduction in JAX. Text in, text out.

The names below come from the modules that define them when they are first used, so that importing a part that needs no
JAX, such as `tfm.config`, does not load it.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfm.answering import Answer
    from tfm.batch import Batch, make_batch
    from tfm.config import PRESETS, ModelConfig, preset
    from tfm.decoding.alignment import AttentionWeights, attention_weights, word_alignment
    from tfm.decoding.beam import BeamSearch, NBest
    from tfm.decoding.constraints import Constraints
    from tfm.decoding.generate import generate, generate_n_best
    from tfm.decoding.inference import decode_step, prefill
    from tfm.decoding.mbr import MinimumBayesRisk
    from tfm.decoding.sampling import Greedy, Samples, Sampling
    from tfm.decoding.score import Scores, score
    from tfm.decoding.stepping import Generation
    from tfm.decoding.stream import stream
    from tfm.nn.cache import Cache, cache_bytes
    from tfm.nn.models import build_model
    from tfm.nn.params import count_params, init_params
    from tfm.nn.recurrent import Recurrent
    from tfm.nn.recurrent_cache import RecurrentCache
    from tfm.nn.transformer import DecoderOnly, EncoderDecoder
    from tfm.pairs import Alignment, PairScore
    from tfm.pipeline import TextModel, load
    from tfm.sharding import Placement, make_placement
    from tfm.store import StoredModel, load_model, save_model
    from tfm.text_constraints import TextConstraints
    from tfm.tokenizer import Tokenizer

_HOMES = {
    "tfm.answering": ("Answer",),
    "tfm.batch": ("Batch", "make_batch"),
    "tfm.config": ("PRESETS", "ModelConfig", "preset"),
    "tfm.decoding.alignment": ("AttentionWeights", "attention_weights", "word_alignment"),
    "tfm.decoding.beam": ("BeamSearch", "NBest"),
    "tfm.decoding.constraints": ("Constraints",),
    "tfm.decoding.generate": ("generate", "generate_n_best"),
    "tfm.decoding.inference": ("decode_step", "prefill"),
    "tfm.decoding.mbr": ("MinimumBayesRisk",),
    "tfm.decoding.sampling": ("Greedy", "Samples", "Sampling"),
    "tfm.decoding.score": ("Scores", "score"),
    "tfm.decoding.stepping": ("Generation",),
    "tfm.decoding.stream": ("stream",),
    "tfm.nn.cache": ("Cache", "cache_bytes"),
    "tfm.nn.params": ("count_params", "init_params"),
    "tfm.nn.models": ("build_model",),
    "tfm.nn.recurrent": ("Recurrent",),
    "tfm.nn.recurrent_cache": ("RecurrentCache",),
    "tfm.nn.transformer": ("DecoderOnly", "EncoderDecoder"),
    "tfm.pairs": ("Alignment", "PairScore"),
    "tfm.pipeline": ("TextModel", "load"),
    "tfm.sharding": ("Placement", "make_placement"),
    "tfm.store": ("StoredModel", "load_model", "save_model"),
    "tfm.text_constraints": ("TextConstraints",),
    "tfm.tokenizer": ("Tokenizer",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [  # noqa: RUF022 - grouped by module, as above
    "Batch", "make_batch",
    "PRESETS", "ModelConfig", "preset",
    "AttentionWeights", "attention_weights", "word_alignment",
    "BeamSearch", "NBest", "Generation", "generate", "generate_n_best", "stream", "decode_step", "prefill",
    "Greedy", "MinimumBayesRisk", "Samples", "Sampling", "Constraints", "Scores", "score",
    "Cache", "RecurrentCache", "cache_bytes", "count_params", "init_params",
    "DecoderOnly", "EncoderDecoder", "Recurrent", "build_model",
    "Alignment", "PairScore",
    "Answer", "TextModel", "load",
    "Placement", "make_placement",
    "StoredModel", "load_model", "save_model",
    "TextConstraints", "Tokenizer",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'tfm' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
