"""Records what PyTorch answers to the cases of tensorcases.py, into tests/data/tensor.json.gz. Run with PyTorch 2.13 installed."""
import gzip
import json

import tensorcases
import torch


def main():
    data = {group: {name: tensorcases.outcome(torch, case) for name, case in tensorcases.cases(group).items()}
            for group in tensorcases.GROUPS}
    data["promotion"] = {name: str(eval(text, {"torch": torch})).removeprefix("torch.") for name, text in tensorcases.promotions().items()}
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    with open(tensorcases.PATH, "wb") as file:
        file.write(gzip.compress(text.encode(), mtime=0))       # the same bytes for the same answers
    print({group: len(entries) for group, entries in data.items()})


if __name__ == "__main__":
    main()
