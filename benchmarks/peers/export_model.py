"""Write the packaged model as a Hugging Face folder in bfloat16, so that every engine reads the same files.

The GGUF's quantised weights are exact in bfloat16 only after rounding; every engine gets the rounded ones.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from minipaged.checkpoints.loading import find_model


def main(folder: Path) -> None:
    if (folder / "config.json").exists():
        return
    source = find_model("smollm2-135m")
    read = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.bfloat16)
    del (
        read.config.quantization_config
    )  # transformers refuses to write what came from a GGUF; a copy it writes
    model = AutoModelForCausalLM.from_config(read.config, dtype=torch.bfloat16)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
