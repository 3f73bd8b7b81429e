"""One GGUF file to a directory that vLLM loads: `python -m pd_serve.ops.model_convert FILE.gguf OUT_DIR`.

A process of its own, so that torch and transformers and their memory are gone when it is done.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def convert(gguf: Path, out: Path) -> None:
    """Dequantize `gguf` to bfloat16 and write safetensors, config and tokenizer (with its chat template) to `out`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where = str(gguf.parent)
    model = AutoModelForCausalLM.from_pretrained(
        where, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=gguf.name)
    if not tokenizer.chat_template:
        raise SystemExit(f"{gguf.name} has no chat template")
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    _portable_tokenizer(out / "tokenizer_config.json", model.config.max_position_embeddings)


def _portable_tokenizer(path: Path, max_length: int) -> None:
    """Name the class that every release of transformers knows, and the real limit."""
    config = json.loads(path.read_text())
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config["model_max_length"] = max_length
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
