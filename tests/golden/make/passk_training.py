"""Writes estimators/passk_training.*: RUCAIBox/Passk_Training's advantages."""

from paper_code import outcome, peer, take
from passk_cases import binary_cases
from scipy.special import comb

PATH = "code/passk_adv.py"


@peer("passk_training", "Passk_Training", "RUCAIBox/Passk_Training")
def main(root, writer):
    given = {"comb": comb, "print": lambda *_: None}
    _, function = take(root / PATH, "calc_adv", "compute_advantage", **given)
    writer.inputs("binary", binary_cases())
    for k in (1, 2, 3):
        writer.add(f"k{k}", outcome(function, K=k))
