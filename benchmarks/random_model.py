"""Models that nobody trained, for tests and measurements of speed: `python -m benchmarks.random_model SHAPE DIR`.

The weights are saved where they have to be equal in several engines (`--weights`); without them a model is for
`load_format: dummy`. The tokenizer has a word for each token id (`w17`), so that texts tell which tokens they are.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

VOCABULARY = 49_152
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 40_960,
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-8b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    # Drawn from a wide range, so that what is far back in the prompt changes the next token.
    "small": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "initializer_range": 0.1,
    },
    "small-moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "router_aux_loss_coef": 0.001,
        "initializer_range": 0.1,
    },
}
CHAT_TEMPLATE = "{% for message in messages %}w3 {{ message['content'] }} w4 {% endfor %}w5 "


def make_model(shape: str, directory: Path, *, weights: bool, seed: int = 0) -> Path:
    """Write config, tokenizer and, with `weights`, random weights (bfloat16 safetensors); return the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**_COMMON, **SHAPES[shape]}, indent=1))
    _write_tokenizer(directory)
    if weights:
        _write_weights(directory, seed)
    return directory


def _write_tokenizer(directory: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({f"w{number}": number for number in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    special = {"unk_token": "w0", "bos_token": "w1", "eos_token": "w2"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, chat_template=CHAT_TEMPLATE, **special)
    tokenizer.save_pretrained(directory)


def _write_weights(directory: Path, seed: int) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=torch.bfloat16)
    config = (directory / "config.json").read_text()
    model.save_pretrained(directory)
    (directory / "config.json").write_text(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--weights", action="store_true")
    options = parser.parse_args()
    print(make_model(options.shape, options.directory, weights=options.weights))


if __name__ == "__main__":
    main()
