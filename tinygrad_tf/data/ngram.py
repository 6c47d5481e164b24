"""How well do counts alone predict a text? The losses that a trained model has to beat."""

import numpy as np

from .tokenizers import as_ids


class WittenBell:
    """Interpolated n-gram probabilities (Witten and Bell, 1991).

    p_n(w|h) = (c(h, w) + T(h) · p_{n-1}(w|h')) / (c(h) + T(h)),    p_0(w) = 1 / V_vocab

    h: the n-1 tokens before w;  h': h without its oldest token;  c(h, w): how often w follows h;  c(h): how often
    anything does;  T(h): how many different tokens do.  An h that never occurred leaves p_{n-1} as it is.
    """

    def __init__(self, order):
        if order < 1:
            raise ValueError(f"WittenBell: order must be at least 1 (unigram), got {order}")
        self.order = order
        self.tables = None

    def fit(self, ids, vocab_size):
        """ids: the training tokens [N], each in 0 to vocab_size - 1 -> self. Raises IndexError, ValueError."""
        tokens = as_ids(ids, vocab_size)
        if len(tokens) == 0:
            raise ValueError("WittenBell.fit: there are no tokens to count")
        self.vocab_size = vocab_size
        self.tables = []
        contexts, number_of_contexts = np.zeros_like(tokens), 1
        for _ in range(self.order):
            table = GramTable(contexts, number_of_contexts, tokens, vocab_size)
            self.tables.append(table)
            # The n-gram that ends at one place is, for order n+1, the context of the next place.
            contexts, number_of_contexts, tokens = table.find(contexts, tokens)[:-1], len(table), tokens[1:]
        return self

    def probabilities(self, ids, order=None):
        """ids: tokens [N] -> float64 [N], the probability of each after those before it.

        The first tokens have shorter contexts. order: at most the order that was fitted, which is the default.
        """
        tokens = as_ids(ids, self.fitted_vocab_size())
        p = np.full(len(tokens), 1 / self.vocab_size)
        contexts = np.zeros_like(tokens)
        for n, table in enumerate(self.tables[: self.checked_order(order)]):
            grams = table.find(contexts, tokens)
            p[n:] = table.interpolate(contexts, grams, p[n:])
            contexts, tokens = grams[:-1], tokens[1:]
        return p

    def nats_per_token(self, ids, order=None):
        """ids: held-out tokens [N] -> float, the mean of -ln p: cross entropy, to be read beside a model's loss."""
        if len(ids) == 0:
            raise ValueError("WittenBell.nats_per_token: there are no tokens to predict")
        return float(-np.log(self.probabilities(ids, order)).mean())

    def fitted_vocab_size(self):
        if self.tables is None:
            raise RuntimeError("WittenBell: nothing has been counted yet; call fit(ids, vocab_size) first")
        return self.vocab_size

    def checked_order(self, order):
        if order is not None and not 1 <= order <= self.order:
            raise ValueError(f"WittenBell: this model was fitted for the orders 1 to {self.order}, got {order}")
        return order or self.order


class GramTable:
    """The counts of one order, as arrays. Contexts and grams are numbers here; -1 is the number of what was never seen.

    keys [G+1]: context · V_vocab + token, ascending; the place of a gram's key is its number.
    counts [G+1]: c(h, w) by gram;  totals, kinds [contexts+1]: c(h), T(h) by context.  Each ends in a 0, for number -1.
    """

    def __init__(self, contexts, number_of_contexts, tokens, vocab_size):
        """contexts, tokens [N]: at each place of the training text, the context and the token that follows it"""
        keys, counts = np.unique(contexts * vocab_size + tokens, return_counts=True)
        context_of_gram = keys // vocab_size
        self.vocab_size = vocab_size
        self.keys = np.append(keys, np.iinfo(np.int64).max)
        self.counts = np.append(counts, 0)
        self.totals = np.bincount(context_of_gram, weights=counts, minlength=number_of_contexts + 1)
        self.kinds = np.bincount(context_of_gram, minlength=number_of_contexts + 1)

    def __len__(self):
        return len(self.keys) - 1

    def find(self, contexts, tokens):
        """contexts, tokens [N] -> the number of each gram [N]"""
        wanted = contexts * self.vocab_size + tokens  # negative, hence never found, where the context is -1
        place = np.searchsorted(self.keys, wanted)
        return np.where(self.keys[place] == wanted, place, -1)

    def interpolate(self, contexts, grams, shorter):
        """contexts, grams [N], shorter [N]: p_{n-1} -> p_n [N]"""
        count, total, kinds = self.counts[grams], self.totals[contexts], self.kinds[contexts]
        return np.where(total > 0, (count + kinds * shorter) / np.maximum(total + kinds, 1), shorter)


def baselines(train_ids, validation_ids, vocab_size, orders=(1, 2, 3, 4)):
    """-> {1: …, 2: …, 3: …, 4: …}: nats per held-out token of the uni-, bi-, tri- and 4-gram counted on train_ids."""
    model = WittenBell(max(orders)).fit(train_ids, vocab_size)
    return {order: model.nats_per_token(validation_ids, order) for order in orders}
