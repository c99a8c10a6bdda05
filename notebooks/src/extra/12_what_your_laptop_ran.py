# %% [markdown]
# # 12 · Study: what your laptop ran
#
# A study beside [lesson 12](../12_engine.ipynb). Lesson 05 ended on attention in plain torch, lesson 01 on a model in
# plain torch. Both are in the engine, and on a CPU without a C++ compiler both serve (with weights laid out once more
# for the processor). With a compiler something else runs: the folder [minipaged/cpu](../../minipaged/cpu), code for speed
# in C++, with one entrance. `LLM` hands it the model and the attention backend, and uses what comes back.

# %%
from pathlib import Path

import torch

import minipaged
from minipaged import LLM, load_model
from minipaged.attention import get_backend
from minipaged.cpu.accelerate import accelerate
from coursekit.lesson import say, show_source, table
from coursekit.silent import exactly

show_source(accelerate)

# %% [markdown]
# | what lessons showed | in plain torch | in `minipaged/cpu` |
# |:--|:--|:--|
# | a key goes to its slot (04, 05) | `LayerKV.write` in `cache/storage.py` | `write_kv` in `csrc/layers.cpp` |
# | one query reads through the table (05, 07) | `attend_gathered` in `attention/torch_backend.py` | `csrc/decode.cpp` |
# | a prompt does (08) | `attend_prefill`, same file | `csrc/prefill.cpp`, if our products are the faster; else torch's |
# | the layers of the model (01) | `model/llama.py` | `CpuLlama` in `modules.py`, `csrc/linear.cpp` or oneDNN's products: what `calibrate.py` measured to be faster |
# | the greedy token | the sampler, from logits | in the head's product, if it is ours, without logits |
#
# The two choose the same tokens, here in float32, where rounding is small. `attention_backend="torch"` takes the folder
# away. (So does a machine without a compiler; `CXX=false` pretends to be one.) The last column is the [time per output
# token](../../docs/glossary.md#tpot).

# %% tags=["nbval-ignore-output"]
plain = load_model("smollm2-135m", dtype=torch.float32, device="cpu")
small = {"device": "cpu", "num_blocks": 8, "max_model_len": 64}


def ask(llm):
    """The answer, what made it, and its milliseconds a token."""
    llm.generate("Paris is", exactly(2), use_tqdm=False)
    (output,) = llm.generate("The sky is blue because", exactly(24), use_tqdm=False)
    model, backend = llm.engine.runner.model, llm.engine.runner.backend
    parts = (model, model.layers[0], model.lm_head, backend)
    kinds = " · ".join(type(part).__name__ for part in parts)
    return output.outputs[0].text, kinds, 1e3 * output.metrics.tpot


in_torch = ask(LLM(plain, attention_backend="torch", **small))
fast, _ = accelerate(plain, get_backend("auto", "cpu"))  # `plain` is used up now
compiled = ask(LLM(fast, **small))
assert in_torch[0] == compiled[0]
print(in_torch[0])
del plain, fast
table(["one request, float32", "ms a token"], [in_torch[1:], compiled[1:]])
faster = in_torch[2] / compiled[2]
say(f"With minipaged/cpu a token takes **{faster:.1f} times** less here; the text is the same.")
assert faster > 0 and len(in_torch[0]) > 0

# %% [markdown]
# And this is where a token's [slot](../../docs/glossary.md#slot) is written, if there is a compiler. Blocks are gone by
# then: a slot is a row of one long array, as in lesson 04.

# %%
layers_cpp = (Path(minipaged.__file__).parent / "cpu/csrc/layers.cpp").read_text()
begin = layers_cpp.index("// cache[slots[row]]")
print(layers_cpp[begin : layers_cpp.index("\n}\n", begin) + 2])
assert "block_size" not in layers_cpp[begin : layers_cpp.index("\n}\n", begin)]

# %% [markdown]
# Where a step's time goes with and without it is in [profile.md](../../docs/profile.md).
