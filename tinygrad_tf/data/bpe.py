"""Byte-level BPE: pairs that often stand side by side become tokens. (guide 15.1; Sennrich et al. 2016; Radford et al. 2019)

    train    text → words → bytes; then, until the vocabulary is full: the most frequent pair of neighbours becomes a token
    encode   word → bytes; then, as long as there is one: of the pairs that are tokens, the one that was learned first is merged
    decode   the bytes of the tokens, one after another

The vocabulary begins with all 256 bytes, so every text has ids. They stand in GPT-2's order: those that print, then the rest.
"""
import heapq
import reprlib
from collections import Counter, defaultdict
from itertools import chain

import numpy as np

from ..arguments import whole_number
from .pretokenizers import require_pattern, words
from .tokenizers import ROLES, SPECIAL_TOKENS, OfBytes, encoded, ids_of_roles, require_entries, require_names

_PRINTED = (*range(33, 127), *range(161, 173), *range(174, 256))
BYTES = (*_PRINTED, *(b for b in range(256) if b not in _PRINTED))             # in GPT-2's order
# In files a byte is one character that prints: its own in Latin-1, else one from 256 on. A blank is Ġ, a line break Ċ.
ALPHABET = dict(zip(BYTES, map(chr, (*_PRINTED, *range(256, 512 - len(_PRINTED))))))
# The other way, to Latin-1; the characters of Latin-1 that stand for no byte go where Latin-1 does not reach.
_BYTE_OF = {**dict.fromkeys(range(256), 0xFFFF), **{ord(character): b for b, character in ALPHABET.items()}}
_OPTIONS = {"roles": {}, "add_bos": False, "skip_unknown": False}               # of files that say them; the others have none of them
_CACHED_WORDS, _CACHED_LENGTH = 1 << 16, 64                                     # no more words are kept, and no longer ones


class BPETokenizer(OfBytes):
    """Subwords of bytes.    trained here: ids 0 to 3 <pad> <bos> <eos> <unk>;  4 to 259 the bytes;  then what was merged

    Every text has ids, and they give it back. A tokenizer from a file of others keeps the ids it has there. (guide 15.1)
    """

    kind, fields = "bpe", ("pattern",)

    def __init__(self, tokens, merges, special_tokens, added_tokens=(), pattern="gpt2", ignore_merges=False, *, roles=(), add_bos=False,
                 skip_unknown=False):
        """tokens: the bytes of each id. merges: pairs of tokens (left, right), the earlier goes first. special_tokens and
        added_tokens: {name: id}, matched in a text when allowed, and always. ignore_merges: a word that is a token stays whole.

        roles: ids of "pad", "bos", "eos", "unk" where the names do not tell them. add_bos: as in Tokenizer. skip_unknown: a byte that
        is no token gets no id. Raises ValueError for what is no vocabulary.
        """
        self.tokens, self.special_tokens, self.added_tokens = tuple(tokens), dict(special_tokens), dict(added_tokens)
        self.pattern, self.ignore_merges, self.cache = pattern, ignore_merges, {}
        self.roles, self.add_bos = dict(roles), add_bos
        names = {**self.special_tokens, **self.added_tokens}
        require_names("BPETokenizer", self.tokens, names)
        named = set(names.values())
        self.ids = {token: i for i, token in enumerate(self.tokens) if i not in named}
        self.merges = {(self.id_of(left), self.id_of(right)): (rank, self.id_of(left + right)) for rank, (left, right) in enumerate(merges)}
        self.special_ids = frozenset(self.special_tokens.values())
        who = {**dict(zip(ROLES, ids_of_roles(self.special_tokens))), **self.roles}
        self.pad_id, self.bos_id, self.eos_id, self.unk_id = (who[role] for role in ROLES)
        self.unknown_bytes = bytes(b for b in range(256) if bytes([b]) not in self.ids)
        self.skip_unknown = skip_unknown and self.unknown_bytes != b""
        self.byte_ids = [self.ids.get(bytes([b]), None if skip_unknown else self.unk_id) for b in range(256)]
        self.require_sound(len(self.tokens) - len(named), len(merges))

    def id_of(self, token):
        if token not in self.ids:
            raise ValueError(f"BPETokenizer: the merges take and make tokens, and {reprlib.repr(token)} is none")
        return self.ids[token]

    def require_sound(self, num_tokens, num_merges):
        if len(self.ids) < num_tokens or b"" in self.ids:
            raise ValueError("BPETokenizer: each token must stand once, and none is empty")
        if len(self.merges) < num_merges:
            raise ValueError("BPETokenizer: each pair of tokens can be merged once")
        require_pattern(self.pattern)
        if not self.roles.keys() <= ROLES.keys() or any(type(i) is not int or not 0 <= i < self.vocab_size for i in self.roles.values()):
            raise ValueError(f"BPETokenizer: roles must be ids from 0 to {self.vocab_size - 1} of {', '.join(ROLES)}")
        if None in self.byte_ids and not self.skip_unknown:
            raise ValueError(f"BPETokenizer: the byte {self.byte_ids.index(None):#04x} is no token, and no special token stands for "
                             f"what is unknown: some texts would have no ids")

    @classmethod
    def train(cls, text, vocab_size, min_frequency=2, pattern="gpt2"):
        """text: a str, or an iterable of them -> the tokenizer of at most vocab_size tokens, fewer where pairs are too rare.

        The pair that stands side by side most often is merged first; of equally frequent ones that with the lower left id, then the
        lower right id. So the result depends on the text alone, and a larger vocabulary begins with a smaller one.
        """
        tokens = [*(name.encode() for name in SPECIAL_TOKENS), *(bytes([b]) for b in BYTES)]
        whole_number("BPETokenizer.train", "vocab_size", vocab_size, least=len(tokens))
        whole_number("BPETokenizer.train", "min_frequency", min_frequency, least=1)
        counted = Counter()
        for part in [text] if isinstance(text, str) else text:
            encoded(part, "utf-8")
            counted.update(words(pattern, part))
        merges = learn(counted, tokens, vocab_size, min_frequency)
        return cls(tokens, merges, {name: i for i, name in enumerate(SPECIAL_TOKENS)}, pattern=pattern)

    def with_special_tokens(self, *names):
        """The tokenizer that has these too, behind all ids that there are."""
        known = [name for i, name in enumerate(names) if name in (*self.special_tokens, *self.added_tokens, *names[:i])]
        if known:
            raise ValueError(f"BPETokenizer.with_special_tokens: there is a special token {known[0]!r} already")
        tokens = [*self.tokens, *(encoded(name, "utf-8") for name in names)]
        special = {**self.special_tokens, **{name: self.vocab_size + i for i, name in enumerate(names)}}
        return BPETokenizer(tokens, self.merged_pairs(), special, self.added_tokens, self.pattern, self.ignore_merges, **self.options())

    def options(self):
        """Those that are not as they usually are."""
        return {name: getattr(self, name) for name, usual in _OPTIONS.items() if getattr(self, name) != usual}

    def merged_pairs(self):
        """The merges in their order, as pairs of bytes."""
        return [(self.tokens[left], self.tokens[right]) for left, right in self.merges]

    # --- text to ids and back -----------------------------------------------------------------------------------------------

    def text_ids(self, text, strict=False, start=0):
        """text: str -> int64 ids [N]."""
        found = words(self.pattern, text)
        if strict and self.unknown_bytes:
            self.require_known(found)
        return np.fromiter(chain.from_iterable(map(self.word_ids, found)), np.int64)

    def require_known(self, found):
        for word in found:
            if len(self.known(word.encode())) < len(word.encode()):
                raise ValueError(f'BPETokenizer.encode: {word!r} has bytes that are no tokens here; pass errors="unk" to '
                                 f"{'leave them out' if self.skip_unknown else 'encode them as the unknown token'}")

    def known(self, word):
        """word: bytes -> those of them that are tokens"""
        return word.translate(None, self.unknown_bytes)

    def word_ids(self, word):
        """word: str -> its ids; those of words seen lately are looked up."""
        ids = self.cache.get(word)
        if ids is None:
            ids = self.merged(word.encode())
            if len(word) <= _CACHED_LENGTH:
                if len(self.cache) >= _CACHED_WORDS:
                    self.cache.clear()
                self.cache[word] = ids
        return ids

    def spelt(self, word):
        """word: bytes -> those of them that get an id"""
        return self.known(word) if self.skip_unknown else word

    def merged(self, word):
        """word: bytes -> list of ids"""
        if self.ignore_merges and word in self.ids:
            return [self.ids[word]]
        return Word([self.byte_ids[b] for b in self.spelt(word)], self.merges).ids()

    # --- how a word came apart ----------------------------------------------------------------------------------------------

    def steps(self, word):
        """word: bytes -> (rank of the merge, pieces after it), one for each merge in turn; first (None, its bytes)."""
        merges, word = {} if self.ignore_merges and word in self.ids else self.merges, self.spelt(word)
        borders = list(range(len(word) + 1))
        yield None, [word[i:i + 1] for i in range(len(word))]
        for rank, border in Word([self.byte_ids[b] for b in word], merges).merged():
            borders.remove(border)
            yield rank, [word[begin:end] for begin, end in zip(borders, borders[1:])]

    def trace(self, text):
        """text: str -> str, to be printed: its words, the merges of each, one a line, and the ids at the end."""
        encoded(text, "utf-8")
        pairs, lines = self.merged_pairs(), []
        for word in words(self.pattern, text):
            lines.append(f"{word!r}: {len(word.encode())} in bytes, {len(self.word_ids(word))} in tokens")
            for rank, pieces in self.steps(word.encode()):
                done = "" if rank is None else f"{rank:5d}: {' + '.join(map(shown, pairs[rank]))}"
                lines.append(f"  {done:24s}{' '.join(map(shown, pieces))}")
        ids = self.encode(text)
        return "\n".join([*lines, f"{' '.join(map(shown, self.pieces(ids, False)))} → {ids.tolist()}"])

    # --- files ----------------------------------------------------------------------------------------------------------------

    def to_dict(self):
        named = {**self.special_tokens, **self.added_tokens}
        names = {i: name for name, i in named.items()}
        return {"type": self.kind, "pattern": self.pattern, "ignore_merges": self.ignore_merges,
                "special_tokens": self.special_tokens, "added_tokens": self.added_tokens,
                "tokens": [names[i] if i in names else written(token) for i, token in enumerate(self.tokens)],
                "merges": [f"{written(left)} {written(right)}" for left, right in self.merged_pairs()], **self.options()}

    @classmethod
    def from_dict(cls, content):
        """The inverse of `to_dict`. Raises ValueError for anything else."""
        require_entries("BPETokenizer.from_dict", content, {"type": str, "pattern": str, "ignore_merges": bool, "special_tokens": dict,
                                                            "added_tokens": dict, "tokens": list, "merges": list})
        if content["type"] != cls.kind:
            raise ValueError(f'BPETokenizer.from_dict: expected {{"type": "{cls.kind}"}}, got {content["type"]!r}')
        options = {name: content[name] for name in _OPTIONS if name in content}
        require_entries("BPETokenizer.from_dict", options, {name: type(_OPTIONS[name]) for name in options})
        named = content["special_tokens"], content["added_tokens"]
        tokens = tokens_from(content["tokens"], {**named[0], **named[1]})
        return cls(tokens, list(map(pair_from, content["merges"])), *named, content["pattern"], content["ignore_merges"], **options)


# --- learning ---------------------------------------------------------------------------------------------------------------

def learn(counted, tokens, vocab_size, min_frequency):
    """counted: {word: how often}; adds to `tokens`, bytes that begin with special names, until there are vocab_size -> the merges."""
    neighbours, merges = Neighbours(counted, len(SPECIAL_TOKENS)), {}           # a dict, for its order
    ids = {token: i for i, token in enumerate(tokens) if i >= len(SPECIAL_TOKENS)}
    while len(tokens) < vocab_size and (pair := neighbours.most_frequent(min_frequency)):
        left, right = (tokens[i] for i in pair)
        new = ids.setdefault(left + right, len(tokens))
        if new == len(tokens):
            tokens.append(left + right)
        neighbours.merge(pair, new)
        merges[left, right] = new               # again, where its tokens were made a second time: the first one counts
    return list(merges)


class Neighbours:
    """Which tokens stand side by side, and how often, while pairs of them are merged.

    All words stand in one row of places, each word once, with its count as weight; place 0 is nobody's, and the neighbour of
    the ends. count[pair] = Σ weight over the places where it begins. where[pair] are the places where it began at some time: a merge
    looks at those and at no other, and what it takes away never comes back, so that all merges together touch O(N log N) places.
    """

    def __init__(self, counted, first_byte_id):
        self.token, self.weight, self.before, self.after = [None], [0], [0], [0]
        self.count, self.where, self.heap = Counter(), defaultdict(list), []
        ids = [first_byte_id + BYTES.index(b) for b in range(256)]
        for word, weight in counted.items():
            self.append([ids[b] for b in word.encode()], weight)
        self.offer(list(self.count))

    def append(self, tokens, weight):
        start, end = len(self.token), len(self.token) + len(tokens)
        self.token += tokens
        self.weight += [weight] * len(tokens)
        self.before += [0, *range(start, end - 1)]
        self.after += [*range(start + 1, end), 0]
        for place in range(start, end - 1):
            self.begin(place, place + 1)

    def begin(self, left, right):
        """The tokens at these places have become neighbours."""
        pair = self.token[left], self.token[right]
        self.count[pair] += self.weight[left]
        self.where[pair].append(left)
        return pair

    def end(self, left, right):
        self.count[self.token[left], self.token[right]] -= self.weight[left]

    def offer(self, pairs):
        for pair in pairs:
            heapq.heappush(self.heap, (-self.count[pair], pair))

    def most_frequent(self, min_frequency):
        """The pair that stands most often, of equals the smallest; None where all are rarer. Offers are of the past: counts fall."""
        while self.heap:
            offered, pair = heapq.heappop(self.heap)
            now = self.count[pair]
            if now == -offered >= min_frequency:
                return pair
            if min_frequency <= now < -offered:
                self.offer([pair])
        return None

    def merge(self, pair, new):
        """Wherever the pair stands, from left to right, its left token becomes `new` and its right one goes."""
        token, before, after, grown = self.token, self.before, self.after, set()
        for left in sorted(self.where.pop(pair)):
            right = after[left]
            if (token[left], token[right]) != pair:
                continue                        # merged with somebody else meanwhile
            outer, behind = before[left], after[right]
            if outer:
                self.end(outer, left)
            if behind:
                self.end(right, behind)
            token[left], token[right] = new, None
            after[left], before[behind] = behind, left
            grown |= {self.begin(a, b) for a, b in ((outer, left), (left, behind)) if a and b}
        del self.count[pair]
        self.offer(grown)


# --- merging ----------------------------------------------------------------------------------------------------------------

class Word:
    """One word while its pairs are merged: the lowest rank first, of equals the leftmost.    symbols: ids [N]; merges: {pair: (rank, id)}

    Links say who is next to whom, `waiting` where each rank may be merged, a heap which rank is the lowest. What is merged meanwhile is
    left in its list and found out later, so N symbols take O(N log N) steps, whatever they are.
    """

    def __init__(self, symbols, merges):
        n = len(symbols)
        self.symbols, self.merges = [*symbols, None], merges                    # None: nobody, at place n and so at −1
        self.before, self.after = list(range(-1, n)), list(range(1, n + 1))
        self.waiting, self.ranks = {}, []
        for place in range(n - 1):
            self.wait(place)

    def found(self, left):
        """(rank, id) of the pair that begins at this place; None where it is no token."""
        return self.merges.get((self.symbols[left], self.symbols[self.after[left]]))

    def wait(self, left):
        if found := self.found(left):
            if found[0] not in self.waiting:
                self.waiting[found[0]] = []
                heapq.heappush(self.ranks, found[0])
            self.waiting[found[0]].append(left)

    def merged(self):
        """Merges all there is, one at a time; yields (rank, where the right one of the two began)."""
        while self.ranks:
            rank = heapq.heappop(self.ranks)
            places = sorted(self.waiting.pop(rank), reverse=True)
            # A lower rank can only come up where a file lets two pairs make one token.
            while places and not (self.ranks and self.ranks[0] < rank):
                left, right = places[-1], self.after[places.pop()]
                if (found := self.found(left)) and found[0] == rank:
                    self.merge(left, right, found[1])
                    yield rank, right
            for left in places:
                self.wait(left)

    def merge(self, left, right, new):
        self.symbols[left], self.symbols[right] = new, None
        self.after[left] = self.after[right]
        self.before[self.after[right]] = left
        self.wait(self.before[left])
        self.wait(left)

    def ids(self):
        """What is left when nothing more can be merged."""
        for _ in self.merged():
            pass
        return [symbol for symbol in self.symbols if symbol is not None]


# --- bytes as characters ----------------------------------------------------------------------------------------------------

def written(token):
    """bytes -> str, a character of GPT-2's alphabet for each, as files hold it"""
    return "".join(ALPHABET[b] for b in token)


def bytes_from(text):
    """The inverse of `written`. Raises ValueError."""
    try:
        return text.translate(_BYTE_OF).encode("latin-1")
    except (UnicodeEncodeError, AttributeError):
        raise ValueError(f"the token {reprlib.repr(text)} is not written in the 256 characters that stand for bytes: this is no "
                         f"byte-level BPE") from None


def tokens_from(written_tokens, named):
    """The bytes of each id; those that bear a name, named: {name: id}, are written as they are. Raises ValueError."""
    return [encoded(token, "utf-8") if isinstance(token, str) and named.get(token) == i else bytes_from(token)
            for i, token in enumerate(written_tokens)]


def pair_from(merge):
    """ "Ġt he", or ["Ġt", "he"] -> (b" t", b"he"). Raises ValueError."""
    parts = merge.split(" ") if isinstance(merge, str) else merge
    if not isinstance(parts, list) or len(parts) != 2:
        raise ValueError(f"a merge must be two tokens with a blank between, got {reprlib.repr(merge)}")
    return bytes_from(parts[0]), bytes_from(parts[1])


def shown(token):
    """bytes -> str to read: a blank as ␣, a line break as ↵, and half a character byte by byte"""
    text = token.decode("utf-8", errors="backslashreplace")
    return "".join({" ": "␣", "\n": "↵"}.get(c, c if c.isprintable() else ascii(c)[1:-1]) for c in text)
