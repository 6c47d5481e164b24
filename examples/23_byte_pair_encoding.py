"""From letters to subwords: a byte-level BPE, step by step.      python examples/23_byte_pair_encoding.py [--quick] [--out DIR]

The pair of neighbours that stands side by side most often becomes a token, again and again. Which pairs come first, how one word
comes apart, how many tokens a text takes as the vocabulary grows, in the language that was learned and in others, and what all that
never does: lose a byte. Needs the package regex (pip install regex). About 3 seconds on a laptop; `--quick` takes 1. Writes
tokens.png.      (guide 15.1)
"""
import argparse
import sys
import time
from collections import Counter
from pathlib import Path

from tinygrad_tf.data import BPETokenizer, ByteTokenizer, CharTokenizer, load_text, split_train_validation
from tinygrad_tf.data.bpe import shown

parser = argparse.ArgumentParser()
parser.add_argument("--quick", action="store_true", help="a smaller vocabulary from less text")
parser.add_argument("--out", type=Path, default=Path("runs/example-23"), help="folder for tokens.png")
arguments = parser.parse_args()
quick = arguments.quick
try:
    import regex  # noqa: F401
except ImportError:
    print("Byte-level BPE finds words by Unicode's classes, with a package that is not installed:  pip install regex")
    sys.exit(0 if quick else 2)

# --- 1. what is learned ---------------------------------------------------------------------------------------------------
V_vocab = 1024 if quick else 4096
text, held_out = split_train_validation(load_text()[:120_000 if quick else None])
begin = time.perf_counter()
tokenizer = BPETokenizer.train(text, V_vocab)
merges = tokenizer.merged_pairs()
print(f"{len(text):,} characters → V_vocab = {tokenizer.vocab_size}: 4 special tokens, 256 bytes, {len(merges):,} merges "
      f"in {time.perf_counter() - begin:.1f} s")
for first in 0, len(merges) // 2, len(merges) - 5:
    print(f"  merges from {first:4d} on:   " + "   ".join(f"{shown(left)} + {shown(right)}" for left, right in merges[first:first + 5]))
longest = sorted((token for token in tokenizer.tokens if token[1:].isalpha()), key=len)[:-7:-1]
print(f"The longest words among them: {'   '.join(map(shown, longest))}\n")
assert tokenizer.vocab_size == V_vocab == 260 + len(merges)

# --- 2. one word, merge by merge ------------------------------------------------------------------------------------------
# A row is a merge: its number, what it joins, and what the word is then. A lower number was learned earlier and goes first.
print(tokenizer.trace("unbelievable!"))
*_, (_, pieces) = tokenizer.steps(b"unbelievable")
ranks = [rank for rank, _ in tokenizer.steps(b"unbelievable")][1:]
assert b"".join(pieces) == b"unbelievable" and [tokenizer.tokens[i] for i in tokenizer.encode("unbelievable")] == pieces
assert ranks == sorted(ranks)
print(f"The guide's pieces are un, believ, able and !; which ones there are depends on the text: here {', '.join(map(shown, pieces))}.\n")

# --- 3. nothing is lost ---------------------------------------------------------------------------------------------------
print("                                    bytes   as characters    as bytes    as subwords")
characters = CharTokenizer.from_text(text)
for sample in held_out[:60], "naïve café", "e\u0301 is e and an accent", "東京 🙂", "a\0b", "<eos> is text":
    ids = [t.encode(sample) for t in (characters, ByteTokenizer(), tokenizer)]
    unknown = int((ids[0] == characters.unk_id).sum())
    print(f"  {ascii(sample)[:32]:32s}{len(sample.encode()):7d}{len(ids[0]):9d}{f', {unknown} unknown' if unknown else '':12s}"
          f"{len(ids[1]):6d}{len(ids[2]):15d}")
    assert tokenizer.decode(ids[2]) == ByteTokenizer().decode(ids[1]) == sample
    assert not set(ids[2]) & tokenizer.special_ids
assert tokenizer.decode(tokenizer.encode(text)) == text
assert tokenizer.encode("<eos>", allowed_special={"<eos>"}).tolist() == [tokenizer.eos_id]
cut = tokenizer.encode("🙂").tolist()[:-1]
print(f"A name in a text is text, unless it is allowed. Half a character is {tokenizer.decode(cut)!r}, "
      f"its bytes {tokenizer.decode_bytes(cut)}.\n")

# --- 4. how much a token holds --------------------------------------------------------------------------------------------
# The merges of a small vocabulary are the first ones of a large one: one training gives all sizes.
sizes = [260, 320, 384, 512, 768, 1024, 1536, 2048, 3072, 4096]
sizes = [size for size in sizes if size <= V_vocab]


def smaller(size):
    return BPETokenizer(tokenizer.tokens[:size], merges[:size - 260], tokenizer.special_tokens)


assert smaller(512) == BPETokenizer.train(text, 512)
TEXTS = {
    "the text that was learned": text, "its end, held out": held_out,
    "German": "Das Wetter war gestern so schlecht, dass wir den ganzen Nachmittag zu Hause blieben und Tee tranken. " * 3,
    "Chinese": "昨天天气很不好，我们整个下午都在家里喝茶看书，晚上才出去散步。" * 3,
}
held = {name: [len(sample.encode()) / len(smaller(size).encode(sample)) for size in sizes] for name, sample in TEXTS.items()}
print("Bytes a token holds      V_vocab =" + "".join(f"{size:7d}" for size in sizes))
for name, row in held.items():
    print(f"  {name:32s}" + "".join(f"{value:7.2f}" for value in row))
    assert row == sorted(row) and row[0] == 1
learned, end, german, chinese = (row[-1] for row in held.values())
assert learned > 2.5 and end > german > 1.2 and chinese < 1.5, "who was not in the text pays more tokens for the same"
print(f"At V_vocab = {V_vocab} a context of 1,000 tokens holds {1000 * end:,.0f} bytes of the held-out text, {1000 * german:,.0f} of "
      f"German and {1000 * chinese:,.0f} of Chinese;\na table of embeddings with C = 64 takes {V_vocab * 64:,} numbers, one of bytes "
      f"{260 * 64:,}.")


# --- the picture ----------------------------------------------------------------------------------------------------------

def draw(path):
    """Left, how many bytes a token holds, over the size of the vocabulary; right, how long tokens are: those there are, those in use."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for (name, row), color in zip(held.items(), ("#1f78b4", "#33a02c", "#d95f02", "#7570b3")):
        left.plot(sizes, row, marker="o", markersize=4, color=color, label=name)
    left.set_xscale("log", base=2)
    left.set_xticks([size for size in sizes if size & (size - 1) == 0], [str(size) for size in sizes if size & (size - 1) == 0])
    left.minorticks_off()
    left.set(title="Bytes a token holds", xlabel="V_vocab", ylim=(0.8, None))
    left.legend(frameon=False)
    used = [len(tokenizer.tokens[i]) for i in tokenizer.encode(held_out)]
    vocabulary = [len(token) for token in tokenizer.tokens[4:]]
    longest = 14
    for lengths, shift, color, name in (vocabulary, -0.2, "#bdbdbd", "in the vocabulary"), (used, 0.2, "#33a02c", "in the held-out text"):
        shares = Counter(min(length, longest) for length in lengths)
        right.bar([length + shift for length in range(1, longest + 1)],
                  [100 * shares[length] / len(lengths) for length in range(1, longest + 1)], width=0.4, color=color, label=name)
    right.set_xticks(range(1, longest + 1), [*map(str, range(1, longest)), f"{longest}+"])
    right.set(title=f"How long tokens are, V_vocab = {V_vocab}", xlabel="bytes", ylabel="% of the tokens")
    right.legend(frameon=False)
    for axes in left, right:
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


draw(arguments.out / "tokens.png")
print(f"The picture: {arguments.out / 'tokens.png'}")
