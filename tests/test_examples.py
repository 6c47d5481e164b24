"""Every example runs as a script, in a process and a folder of its own, and says what it should.

The examples assert their claims themselves: exit status 0 is the test, and the lines show that they got to the end.
"""
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tinygrad_tf.kernels import cpu_emulator
from tinygrad_tf.pretrained.packages import PACKAGES, file_of

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("[0-9][0-9]_*.py"))
PUBLISHED = {name for name, package in PACKAGES.items() if file_of(package)}
HAS_DIGITS = importlib.util.find_spec("sklearn") is not None

LINES = {
    "01_hello_attention": ["The sentence: I love AI", "X = table[ids]   [B, T, C] = [1, 3, 4]",
                           "weights = softmax(masked)   [B, T, T] = [1, 3, 3]",
                           "By hand = scaled_dot_product_attention = MultiHeadAttention"],
    "02_softmax_by_hand": ["e^… = [1.000, 0.368, 0.135]", "Σ = 1.503", "p = [0.665, 0.245, 0.090]", "softmax: right",
                           "broken: gradcheck of broken"],
    "03_overfit_one_batch": ["  50   1.117   1.117", "100% of the 32 tokens", "loss.png"],
    "04_train_and_generate": ["n-gram baselines", "validation loss", "cached = uncached, token for token", "A sample"],
    "05_positions": ["no positions             0.200  0.200  0.200  0.200  0.200", "with offset=20, 0.26 with offset=0",
                     "half-split = interleaved after conversion", "the future is not hidden", "positions.png"],
    "06_trace": ["softmax over keys  attn = torch.softmax(scores, dim=-1)      [B, T, T]", "Q, K, V            [B, T, C]    [B, H, T, Dh]",
                 "attention 9,408", "27,648           27,648", "536,870,912 bytes = 512 MiB"],
    "07_digits_encoder": ["1,437 images to train on, 360 held out", "test accuracy", "digits.png"] if HAS_DIGITS else ["pip install"],
    "08_modern_decoder_text": ["n-gram baselines", "validation loss", "cached = uncached, token for token", "A sample"],
    "09_dates_encoder_decoder": ["5 March 1999; March 5, 1999; 05-Mar-1999; 1999/03/05", "200 held-out days", "cached = uncached",
                                 "alignment.png"],
    "10_experiments": ["12    3       6          6               6", "C = 48, H = 4: head_dim = 12",
                       "it looks ahead", "All of it holds."],
    "11_flash_attention": ["[2.0, 5.0]       5    0.135             1.203                44.383",
                           "out = acc / l = 40.038        lse = m + ln l = 5.456", "4  5  6  ·", "5 × 3             10",
                           "512     262,144     262,144    60,992", "memory.png"],
    "12_cuda_kernel_on_cpu": ["equal bit for bit in 3 of 3 orders", "put __syncthreads() between", "but `x` ends at [299]",
                              "at different barriers", "nobody has set in this block", "32× with rows of 32, 1× with rows of 33",
                              "banks.png"] if cpu_emulator.refusal() is None else ["The CPU emulator of CUDA kernels"],
    "13_device": ["cpu      loss", "ms a step", "loaded on the CPU"],
    "14_kv_cache": ["step 3: only K3, V3 are computed   cache = [1, 2, 3]   in memory: joined [1, 2, 3], allocated once [1, 2, 3, 0, 0]",
                    "RollingKVCache, W = 32           60 of 60", "6,144 bytes =  24 tokens: 1 + 2 + 3 blocks of 4",
                    "2048 MiB with Hkv = H = 32, 512 with Hkv = 8", "256 times the operations at T = 256", "time_per_token.png"],
    "15_decoding_lab": ["entropy", "top-k 5                                         5", "greedy                      0.00",
                        "{'frequency_penalty': 0.5}", "8 beams", "decoding.png"],
    "16_speculative_decoding": ["✓ accepted   ✗ rejected   → corrected   + bonus", "a smaller model: 47 tokens in", "n-gram: 47 tokens in",
                                "Greedy, with either draft and without", "Σ min(p, q)", "the draft alone", "speculation.png"],
    "17_paged_cache": ["each reads a token of its own         5 of 8 blocks   row 0: [0, 1, 3]   row 1: [0, 1, 4]   row 2: [0, 1, 2]",
                       "step   1   AAABCCCDDDDDDEEEEE", "the preallocated cache has 81,920, for 5 × 64", "The same texts.", "blocks.png"],
    "18_mixture_of_experts": ["token      2, 0      0.58, 0.42     8,  5",
                              "expert 2 computes rows  8 to 13:  token, each, goes, two, of, experts",
                              "With a capacity of 4, 4 of 16 pairs are dropped", "left alone                 4.00", "expert 3:",
                              "experts.png"],
    "19_fake_quantisation": ["3 bits: 7 levels, [-1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5]", "from -1.745 to 1.745",
                             "one scale                 96.2%  70.7%", "trained while rounded   loss", "fake_quantisation.png"],
    "20_quantised_weights": ["1f          7a          5f          8a", "4 + 16 / 32 = 4.5 bits a weight",
                             "never worse than rounding to nearest", "int4, groups of 32, gptq |          4.50",
                             "Smaller is not faster by itself", "quantised_weights.png"],
    "21_mixed_precision": ["float16    6.6e+04    6.0e-08       1.0009766     0.0e+00        inf   1.0000000",
                           "in float16:  Linear  Attention  Gelu", "all in float16         nan at step 2",
                           "at step 30 the scale goes from 262144", "mixed_precision.png"],
    "22_gradient_checkpointing": ["f has run ['first', 'again'], with the same dropout", "52 gradients are equal bit for bit",
                                  "memory.png"],
    "23_byte_pair_encoding": ["4 special tokens, 256 bytes, 764 merges", "'unbelievable': 12 in bytes", "2 unknown",
                              "its bytes b'\\xf0\\x9f\\x99'", "Bytes a token holds      V_vocab =    260", "tokens.png"],
    "24_batches_and_packing": ["packed: 3 rows of 15, 87% of the places are real, 35 targets count",
                               "reads not·to·be¶that¶   predicts ot·to·be¶_hat¶_   stands at 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4",
                               "no segment_ids: texts read their neighbours", "packed, the longest first", "goes on as if nothing had been",
                               "layouts.png"],
    "25_training_run": ["The parts: embedding, blocks.0, blocks.1, final_norm", "half a line in its metrics, and resumed",
                        "the one before it is used instead: checkpoint-000030.safetensors, of step 30", "it ends with the same bits again",
                        "cosine                     0.00203 / 0.02000", "schedules.png"],
    "26_doctor": ["LEAK OF FUTURE TOKENS", "logits at or before it change by", "Nothing found by 23 checks.",
                  "28 faults, 5 healthy models", "no causal mask", "Each fault is named, and nothing else; no false alarm.",
                  "confusion.png"],
    "27_seeing_inside": ["weights of \"=\" on  ", "the largest weight of all is on a number that does not matter", "attention × gradient",
                         "blocks.1.attn.hook_pattern      [60, 2, 4, 4]   float32", "layer 1    5 ", "right with zeros",
                         "seeing_inside.png"],
    "28_chat_model": ["token_embd.weight", "134,515,008 parameters", "The capital of France is Paris"]
    if "smollm2" in PUBLISHED else ["pip install"],
    "29_sentence_similarity": ["'Borrowing money has become more expensive.', with no word in common", "similarity.png"]
    if "minilm" in PUBLISHED else ["pip install"],
    "30_shards": ["3 rows, 22 targets: 0.3143 · 4.1672", "1 shard: differs from the whole by 0e+00; 10 of 10 runs have the same bits",
                  "10 of 10 runs", "the same bits again True", "ms for forward and backward of 8 rows", "shards.png"],
}
pytestmark = pytest.mark.host("processes of their own, on the CPU; on a device: test_device.py")
WRITING = [path for path in EXAMPLES if '"--out"' in path.read_text(encoding="utf-8") and (HAS_DIGITS or "digits" not in path.stem)
           and ("minilm" in PUBLISHED or "similarity" not in path.stem)
           and (cpu_emulator.refusal() is None or "cuda" not in path.stem)]


def run(example, folder, *arguments):
    """stdout of a script; its stderr is the message where it fails."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8", "PYTHONWARNINGS": "error::RuntimeWarning"}
    done = subprocess.run([sys.executable, str(example), *arguments], cwd=folder, env=environment, capture_output=True, text=True,
                          encoding="utf-8", timeout=300)
    assert done.returncode == 0, f"{example.name} ended with status {done.returncode}:\n{done.stderr[-3000:]}"
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_it_ends_well_and_says_what_it_should(example, tmp_path):
    printed = run(example, tmp_path, "--quick")
    assert [line for line in LINES[example.stem] if line not in printed] == []


@pytest.mark.parametrize("example", WRITING, ids=lambda path: path.stem)
def test_files_go_where_out_says_and_nowhere_else(example, tmp_path):
    (tmp_path / "here").mkdir()
    run(example, tmp_path / "here", "--quick", "--out", str(tmp_path / "there"))
    assert list((tmp_path / "here").iterdir()) == []
    written = {path.suffix: path.read_bytes() for path in (tmp_path / "there").iterdir()}
    assert written and written.get(".png", b"\x89PNG").startswith(b"\x89PNG") and written.get(".txt", b"The ").startswith(b"The ")


def test_without_scikit_learn_the_digits_say_what_to_install(tmp_path):
    """Status 2, and 0 in quick mode, whether it is installed or not: a module of that name that cannot be imported comes first."""
    (tmp_path / "sklearn.py").write_text("raise ImportError", encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    for arguments, status in ([], 2), (["--quick"], 0):
        done = subprocess.run([sys.executable, str(ROOT / "examples" / "07_digits_encoder.py"), *arguments], cwd=tmp_path, env=environment,
                              capture_output=True, text=True, encoding="utf-8", timeout=60)
        assert (done.returncode, done.stderr) == (status, "") and "pip install 'tinygrad_tf[examples]'" in done.stdout


def test_without_a_compiler_the_emulator_says_what_to_install(tmp_path):
    """Status 0: no folder of PATH has a g++."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": str(tmp_path), "CXX": ""}
    done = subprocess.run([sys.executable, str(ROOT / "examples" / "12_cuda_kernel_on_cpu.py")], cwd=tmp_path, env=environment,
                          capture_output=True, text=True, encoding="utf-8", timeout=60)
    assert (done.returncode, done.stderr) == (0, "") and "The CPU emulator of CUDA kernels" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_every_example_is_in_the_table_and_numbered_in_reading_order():
    assert [path.stem for path in EXAMPLES] == sorted(LINES)
    assert [int(path.stem[:2]) for path in EXAMPLES] == list(range(1, len(EXAMPLES) + 1))
