"""Two hundred texts that tokenizers stumble over: made from a seed, the same each time."""
import random

PIECES = [
    " ", "  ", "   ", "\t", "\n", "\r\n", "\r", "\n\n\n", "\0", "\x04", "\x1c", "\x1d", "\x85", "\xa0", "\u2003", "\u200b", "\u3000",
    "\ufeff", "1", "12", "2024", "3.14", "½", "x²", "Ⅻ", "٣٤", "१", "'s", "'S", "'ll",
    "’re", "a", "Don't", "naïve", "e\u0301", "Å", "A\u030a",
    "ß",
    "İ", "ﬁ",
    "東京", "中文字", "こんにちは", "한국어", "مرحبا", "שלום", "สวัสดี", "नमस्ते", "🙂", "\U0001f469\u200d\U0001f467", "🇫🇷", "✋🏽",
    "\U000e0001", "\U0010ffff", "\U00050000", "𝔘", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_", "<repo_name", "</s>", "[PAD]",
    "def f(x):\n    return x ** 2", "http://a.b/c?d=e&f#g", "!!!", "...", "—", "“quoted”", "#include <x>", "a_b-c", "\\n", "_", "Ġ", "Ċ",
    "##", "€", "ﷺ", "ZZZZ"]
WHOLE = [
    "", " ", "\n", "\0", "a", "1", " 1", "  1", "a  1", "1  a", " \n 1", "a" * 3000, " " * 3000, "1" * 3000, "\n" * 500,
    "🙂" * 200,
    "e" + "\u0301" * 300, "ab " * 700,
    "! " * 700, "9 " * 700, "\r\n" * 300, "東" * 300, "\x04" * 50, "a\x04b", "the\x06 cat", "\U00050000 x"]


def texts(n=200):
    chance = random.Random(0)
    return WHOLE + ["".join(chance.choices(PIECES, k=chance.randrange(1, 30))) for _ in range(n - len(WHOLE))]
