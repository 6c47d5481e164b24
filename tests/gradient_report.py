"""Prints how well the gradients are tested: python tests/gradient_report.py"""
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import gradcases  # noqa: E402
import mutants  # noqa: E402

import tinygrad_tf  # noqa: E402
from tinygrad_tf.gradcheck import gradient_error  # noqa: E402


def errors():
    """(error, case) for each case, the largest first."""
    tinygrad_tf.manual_seed(0)
    found = [(gradient_error(c.function, c.inputs()), c.name) for c in gradcases.CASES]
    return sorted(found, reverse=True)


def report(kind, verdicts):
    """One line: mutants tried, caught, and in how many of the cases to which they apply; then those that got away."""
    tried = [v for v in verdicts if v.applies]
    caught = [v for v in tried if v.caught]
    in_cases, of_cases = sum(len(v.caught) for v in tried), sum(len(v.applies) for v in tried)
    print(f"{kind:<20} {len(caught)} caught of {len(tried)} tried, in {in_cases} of {of_cases} cases that they change; "
          f"{len(verdicts) - len(tried)} change nothing")
    for v in tried:
        if not v.caught:
            print(f"    NOT CAUGHT: {v.op}, {v.name}")
    return len(caught) == len(tried)


def main():
    ops = gradcases.differentiable_ops()
    missing = [op for op in ops if not gradcases.cases_of(op)]
    print(f"{'operations':<20} {len(ops)}" + (f", without a case: {', '.join(missing)}" if missing else ""))
    print(f"{'cases':<20} {len(gradcases.CASES)}")
    right = report("generic mutants", [v for op in ops for v in mutants.generic_verdicts(op)])
    right &= report("hand-made mutants", [v for op in mutants.HAND_MADE for v in mutants.hand_made_verdicts(op)])
    largest = errors()
    print(f"{'largest error':<20} {largest[0][0]:.2g}  (max|Δ| / max|reference|, float64; {largest[0][1]})")
    print(f"{'median error':<20} {largest[len(largest) // 2][0]:.2g}")
    return 0 if right and not missing and largest[0][0] <= 1e-6 else 1


if __name__ == "__main__":
    sys.exit(main())
