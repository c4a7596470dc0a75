"""Models that between them hold every pair of what can be chosen."""

import typing

from tiny_models import tiny_config

from tfm.config import ModelConfig, Positions


def mixtures() -> list[ModelConfig]:
    """Every pair of architecture, position kind, number of key/value heads and norm position, and other parts."""
    configs = []
    for i, positions in enumerate(typing.get_args(Positions)):
        for j, kv_heads in enumerate((4, 2, 1)):
            configs.append(
                tiny_config(
                    positions=positions,
                    num_kv_heads=kv_heads,
                    architecture=("encoder-decoder", "decoder-only")[(i + j) % 2],
                    norm_position=("pre", "post")[(i // 2 + j // 2 + j) % 2],
                    norm=("layernorm", "rmsnorm")[(i + j) // 2 % 2],
                    gated=j == 1,
                    use_bias=j != 2,
                    shared_embeddings=("none", "target-output", "all")[(i + j) % 3],
                    decoder_layers=1 + (j == 0),
                )
            )
    return configs


def each_positions() -> list[ModelConfig]:
    """Each kind of positions once, with key/value heads of every number and both architectures among them."""
    every = mixtures()
    return [every[3 * i + i % 3] for i in range(len(every) // 3)]


def name_of(config: ModelConfig) -> str:
    if config.architecture == "recurrent":
        return f"{config.cell}-{config.source_context}"
    return f"{config.architecture}-{config.positions}-{config.kv_heads}kv-{config.norm_position}"
