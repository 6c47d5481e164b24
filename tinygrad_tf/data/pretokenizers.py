"""Text to words, before any pair is merged: no token of a byte-level BPE crosses the border of two of these. (guide 15.1)"""
import functools

# The blank belongs to the word that it stands before: " the" is one word, and of several blanks the last goes with it.
PATTERNS = {
    # Radford et al. 2019, "Language Models are Unsupervised Multitask Learners": English endings, letters, digits, signs, blanks
    "gpt2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    # Llama 3: capitals too, at most three digits, a sign may go before letters, line breaks apart from blanks
    "llama3": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    # Qwen 2: the same, but each digit for itself
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    # SmolLM: a text is cut at each digit first, and then by GPT-2's pattern, so that before a digit blanks stay together
    "smollm": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+",
}
INSTALL = "pip install regex"                   # or 'tinygrad_tf[tokenizers]'


@functools.cache
def pattern(name):
    r"""The compiled pattern of that name. Raises ValueError for no name, ImportError where the package `regex` is missing.

    \p{L} and \p{N} are Unicode's letters and numbers. Python's own re has no names for them, and its \s holds four control
    characters that are no white space to these patterns.
    """
    require_pattern(name)
    try:
        import regex
    except ImportError:
        raise ImportError(f"byte-level BPE finds words by Unicode's classes of letters and numbers, for which Python's own re has no "
                          f"names: {INSTALL}") from None
    return regex.compile(PATTERNS[name])


def require_pattern(name):
    if name not in PATTERNS:
        raise ValueError(f"BPETokenizer: pattern must be one of {', '.join(PATTERNS)}, got {name!r}")


def words(name, text):
    """text: str -> its words in order, list of str; joined they are the text."""
    return pattern(name).findall(text)
